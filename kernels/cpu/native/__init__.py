"""The native CPU kernels: C++ in `src`, compiled once, called for a whole step at a time."""
