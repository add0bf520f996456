// Everything that is compiled once for each instruction set, as one unit: it takes a few seconds.
#include "quantise.cpp"
#include "linear.cpp"
#include "rope.cpp"
#include "attention.cpp"
#include "table.cpp"
