// Runs the operations of a step, one after the other, each shared by the threads.
#pragma once
#include "kernels.h"
#include "threads.h"

namespace chatkv {

void run_step(Threads& threads, const Kernels& kernels, const Step& step);

} // namespace chatkv
