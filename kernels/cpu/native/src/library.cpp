// What Python calls.
#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#endif

#include "step.h"

namespace chatkv {

// The variants that this library was built with; others are not there.
#ifndef CHATKV_HAS_SCALAR
const Kernels* scalar_kernels() { return nullptr; }
#endif
#ifndef CHATKV_HAS_AVX2
const Kernels* avx2_kernels() { return nullptr; }
#endif
#ifndef CHATKV_HAS_AVX512
const Kernels* avx512_kernels() { return nullptr; }
#endif
#ifndef CHATKV_HAS_NEON
const Kernels* neon_kernels() { return nullptr; }
#endif

namespace {

#if defined(__x86_64__)
// gcc before 11 and clang before 18 do not know __builtin_cpu_supports("f16c"). The system's part is the same as AVX's.
bool has_f16c() {
    unsigned a, b, c, d;
    return __get_cpuid(1, &a, &b, &c, &d) && (c & bit_F16C);
}
#endif

// Best first; null where this processor or this build lacks it.
const Kernels* runnable(int index) {
    switch (index) {
#if defined(__x86_64__)
    case 0:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                       __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
                       __builtin_cpu_supports("avx512vnni")
                   ? avx512_kernels()
                   : nullptr;
    case 1:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c()
                   ? avx2_kernels()
                   : nullptr;
#elif defined(__aarch64__) && defined(__linux__)
    case 2:
        return (getauxval(AT_HWCAP) & HWCAP_ASIMDDP) && (getauxval(AT_HWCAP) & HWCAP_ASIMDHP) ? neon_kernels()
                                                                                             : nullptr;
#endif
    case 3:
        return scalar_kernels();
    default:
        return nullptr;
    }
}

} // namespace

} // namespace chatkv

extern "C" {

// Name of variant `index` (0 .. 3, best first), or null where it cannot run here.
const char* chatkv_variant(int index) {
    const chatkv::Kernels* kernels = chatkv::runnable(index);
    return kernels ? kernels->name : nullptr;
}

// Sizes of the structs, to compare with Python's: 0 Matrix, 1 Span, 2 Op, 3 Step.
int chatkv_struct_bytes(int which) {
    const int sizes[] = {sizeof(chatkv::Matrix), sizeof(chatkv::Span), sizeof(chatkv::Op), sizeof(chatkv::Step)};
    return sizes[which];
}

void* chatkv_threads_new(int num_threads) { return new chatkv::Threads(num_threads); }

void chatkv_threads_free(void* threads) { delete static_cast<chatkv::Threads*>(threads); }

int chatkv_threads_awake(void* threads) { return static_cast<chatkv::Threads*>(threads)->num_awake_workers(); }

// Runs the step on the variant of this index. From one thread at a time for each `threads`.
void chatkv_run(void* threads, int variant, const chatkv::Step* step) {
    chatkv::run_step(*static_cast<chatkv::Threads*>(threads), *chatkv::runnable(variant), *step);
}
}
