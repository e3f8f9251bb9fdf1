// What translated functions and kernels are written in: tuples, and names of a few operations.
// It compiles with NVRTC, and with any C++17 compiler that is given `host.h` first.

#ifndef DEVICE
#define DEVICE static __device__ __forceinline__
#define LANES 32
#define LANE (threadIdx.x & 31)
#endif

typedef unsigned long long Word;
typedef long long Size;

template <class A, class B> struct Same { static constexpr bool value = false; };
template <class A> struct Same<A, A> { static constexpr bool value = true; };
template <class A, class B> inline constexpr bool same = Same<A, B>::value;

struct Pack0 {};
template <class A> struct Pack1 { A a0; };
template <class A, class B> struct Pack2 { A a0; B a1; };
template <class A, class B, class C> struct Pack3 { A a0; B a1; C a2; };
template <class A, class B, class C, class D> struct Pack4 { A a0; B a1; C a2; D a3; };
template <class A, class B, class C, class D, class E> struct Pack5 { A a0; B a1; C a2; D a3; E a4; };

DEVICE Pack0 pack() { return {}; }
template <class A> DEVICE Pack1<A> pack(A a) { return {a}; }
template <class A, class B> DEVICE Pack2<A, B> pack(A a, B b) { return {a, b}; }
template <class A, class B, class C> DEVICE Pack3<A, B, C> pack(A a, B b, C c) {
  return {a, b, c};
}
template <class A, class B, class C, class D> DEVICE Pack4<A, B, C, D> pack(A a, B b, C c, D d) {
  return {a, b, c, d};
}
template <class A, class B, class C, class D, class E>
DEVICE Pack5<A, B, C, D, E> pack(A a, B b, C c, D d, E e) {
  return {a, b, c, d, e};
}

template <int I, class T> DEVICE auto at(const T &x) {
  if constexpr (I == 0) return x.a0;
  else if constexpr (I == 1) return x.a1;
  else if constexpr (I == 2) return x.a2;
  else if constexpr (I == 3) return x.a3;
  else return x.a4;
}
template <int I, class T> DEVICE T at(T *x) { return x[I]; }

template <class To, class From> DEVICE To bits(From from) {
  union { From from; To to; } both;
  both.from = from;
  return both.to;
}

DEVICE float root(float x) { return sqrtf(x); }
DEVICE double root(double x) { return sqrt(x); }
DEVICE float whole(float x) { return floorf(x); }
DEVICE double whole(double x) { return floor(x); }
DEVICE float size_of(float x) { return fabsf(x); }
DEVICE double size_of(double x) { return fabs(x); }
// One of two, in the type that holds both; of its type alone something is made.
template <class A, class B> DEVICE auto either(A a, B b) { return true ? a : b; }
// As in Python, the first of two that are equal or cannot be compared.
template <class A, class B> DEVICE auto larger(A a, B b) -> decltype(a + b) { return b > a ? b : a; }
template <class A, class B> DEVICE auto smaller(A a, B b) -> decltype(a + b) { return b < a ? b : a; }

template <class T> inline constexpr bool fraction = same<T, float> || same<T, double>;
// A quotient; of whole numbers it is a fraction, as in Python.
template <class A, class B> DEVICE auto over(A a, B b) {
  if constexpr (fraction<A> || fraction<B>) return a / b;
  else return (double)a / (double)b;
}

DEVICE double endless(double sign) { return sign * bits<double>((Size)0x7ff0000000000000ll); }
DEVICE double nothing() { return bits<double>((Size)0x7ff8000000000000ll); }
template <class T> DEVICE bool missing(T v) { return v != v; }

// One number for all lanes of a warp: the sum of theirs, in one order.
template <class T> DEVICE T warp_sum(T x) {
#if LANES > 1
  for (int far = LANES / 2; far > 0; far /= 2) x += __shfl_xor_sync(0xffffffffu, x, far);
#endif
  return x;
}

#define THREAD ((Size)blockIdx.x * blockDim.x + threadIdx.x)
#define THREADS ((Size)gridDim.x * blockDim.x)
// A warp's number among all, and how many there are.
#define WARP (THREAD / LANES)
#define WARPS (THREADS / LANES)
