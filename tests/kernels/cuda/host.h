// Stands in for CUDA, so that a C++ compiler of this machine runs kernels thread by thread.
#include <cmath>
#define __global__
#define DEVICE static inline
#define LANES 1
#define LANE 0
struct Place { unsigned int x, y, z; };
static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
