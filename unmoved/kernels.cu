// A stack of 3x3 convolutions without padding, 32 filters each, with bias and ReLU, as three kernels:
//
//   encode_*   all layers of one image in one thread block: what lies between them never leaves shared memory
//   descend    the gradient with respect to every layer's output, the same way back
//   weigh_*    one layer's weight and bias gradient, summed over the images of a block in registers
//
// Products are bf16 on the tensor cores, sums are fp32. For Hopper (sm_90a). Images and activations are channels-last: a pixel
// of 32 channels is 64 bytes, one of an input image 16 channels, the last of which are zero.
//
// Dual batches (see networks.py): rows n .. n + t - 1 are the tangents of rows 0 .. t - 1. They take no bias, and pass a
// ReLU where the row they belong to does.
//
// How a convolution becomes matrix products. Pixels are the rows of A, input channels the inner dimension, filters the
// columns of B; the nine taps are nine products whose rows start at other pixels. ldmatrix takes an address per row, so
// shifted rows cost nothing and nothing is unrolled in memory. The inner layers, where nearly all the work is, use
// wgmma: four warps together multiply 64 pixels with the weights, which lie in shared memory. The first layer and the
// weight gradients use mma.sync.
//
// Which activations are positive is also written as bits, one word per pixel: the gates of tangents and gradients. Filter
// 8 n + 2 q + h is bit 16 h + 4 q + n, which is how the lanes hold them.

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;

#define THREADS 512        // of encode and descend: 4 warpgroups
#define WARPS 16
#define WEIGH_THREADS 384  // 4 groups of warps share out the pixels; the 3 warps of a group share out the taps
#define GROUPS 4
#define STRIP 8            // output rows that weigh loads at a time

extern __shared__ __align__(128) char shared_memory[];

__device__ __forceinline__ u32 shared_base() {
    u32 address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(shared_memory));
    return address;
}

// Where the 16-byte unit `unit` of a buffer lies. Eight rows that ldmatrix reads at once, one pixel or two apart, would
// otherwise share memory banks.
__device__ __forceinline__ u32 place(u32 unit) { return (unit ^ ((unit >> 3) & 7)) << 4; }

__device__ __forceinline__ void ldmatrix(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void ldmatrix_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(address));
}

__device__ __forceinline__ void mma(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// 64 pixels (16 per warp) x 16 channels, in registers, times 16 channels x 32 filters, in shared memory: 4 x 2 blocks of
// 8 filters x 8 channels, 128 bytes each.
__device__ __forceinline__ void wgmma(float (&d)[4][4], const u32 (&a)[4], u32 weights) {
    unsigned long long b = (weights & 0x3ffff) >> 4 | 8ull << 16 | 16ull << 32;  // the next 8 channels, the next 8 filters
    asm volatile(
        "{ .reg .pred p; setp.eq.u32 p, 0, 0;"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, {%16,%17,%18,%19}, %20, p, 1, 1, 0; }"
        : "+f"(d[0][0]), "+f"(d[0][1]), "+f"(d[0][2]), "+f"(d[0][3]), "+f"(d[1][0]), "+f"(d[1][1]), "+f"(d[1][2]),
          "+f"(d[1][3]), "+f"(d[2][0]), "+f"(d[2][1]), "+f"(d[2][2]), "+f"(d[2][3]), "+f"(d[3][0]), "+f"(d[3][1]),
          "+f"(d[3][2]), "+f"(d[3][3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

__device__ __forceinline__ u32 pack(float low, float high) {  // two bf16
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ void store(u32 address, u32 value) {
    asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(value) : "memory");
}

__device__ __forceinline__ void store(u32 address, uint4 v) {
    asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
                 : "memory");
}

__device__ __forceinline__ uint4 load(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(address));
    return v;
}

__device__ __forceinline__ void copy_async(u32 to, const void* from) {  // 16 bytes
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The gates of filters 8 n + 2 q + {0, 1} as a mask over two bf16.
__device__ __forceinline__ u32 mask(u32 gates, int n, int q) { return (gates >> (4 * q + n) & 0x00010001) * 0xffff; }

// Byte i of v as a float minus 2^15: with the byte above the last 8 bits, 2^15 has the unit of a byte's last bit.
__device__ __forceinline__ float byte(u32 v, int i) { return __uint_as_float(__byte_perm(v, 0x47000000, 0x7504 | i << 4)); }

// Four neighbouring channels of an input pixel as two pairs of bf16.
__device__ __forceinline__ uint2 channels(u32 v, float centre) {
    float zero = 32768.f + centre;
    return make_uint2(pack(byte(v, 0) - zero, byte(v, 1) - zero), pack(byte(v, 2) - zero, byte(v, 3) - zero));
}

__device__ __forceinline__ uint2 channels(const u8* p, float centre) { return channels(*(const u32*)p, centre); }

__device__ __forceinline__ uint2 channels(const u16* p, float) { return *(const uint2*)p; }

// What becomes of a layer's sums.
struct Job {
    int pixels;
    float scale;
    const float* bias;   // or null
    bool relu;
    const u32* gates;    // decide instead of a ReLU, or null
    u32* positive;       // where to write the gates, or null
    u32 to;              // shared memory
};

// The same for a tile of 16 pixels. A lane has two of them, 8 apart (`half`), and filters 8 n + 2 (lane % 4) + {0, 1}.
struct Finish : Job {
    float own_bias[4][2];

    __device__ Finish(const Job& job) : Job(job) {
#pragma unroll
        for (int n = 0; n < 4; n++)
#pragma unroll
            for (int h = 0; h < 2; h++) own_bias[n][h] = bias ? bias[8 * n + 2 * (threadIdx.x & 3) + h] : 0.f;
    }

    __device__ __forceinline__ int pixel(int first, int half) const { return first + half * 8 + ((threadIdx.x & 31) >> 2); }

    // Asked for before the sums are made, so that it has arrived after.
    __device__ __forceinline__ u32 gate(int first, int half) const {
        return gates ? gates[min(pixel(first, half), pixels - 1)] : 0;
    }

    __device__ __forceinline__ void operator()(const float (&sum)[4][4], int first, u32 gate, int half) const {
        int q = threadIdx.x & 3, p = pixel(first, half);
        u32 bits = 0, at = to + place(p * 4) + 4 * q;
#pragma unroll
        for (int n = 0; n < 4; n++) {
            float x = sum[n][2 * half] * scale + own_bias[n][0], y = sum[n][2 * half + 1] * scale + own_bias[n][1];
            u32 value = pack(x, y);
            if (relu) asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(value) : "r"(0));
            if (gates) value &= mask(gate, n, q);
            if (positive) bits |= (value + 0x7fff7fff & 0x80008000) >> (15 - n);  // no sign here: carries if not zero
            if (p < pixels) store(at ^ n << 4, value);
        }
        if (positive) {  // the four lanes of a pixel together
            bits <<= 4 * q;
            bits |= __shfl_xor_sync(0xffffffff, bits, 1);
            bits |= __shfl_xor_sync(0xffffffff, bits, 2);
            if (q == 0 && p < pixels) positive[p] = bits;
        }
    }
};

// The window of an image that a view is: rows and columns are shifted, borders repeated.
struct Window {
    int height, width, dy, dx;

    __device__ Window(int height, int width, const long long* offset) : height(height), width(width) {
        dy = offset ? (int)offset[0] : 0, dx = offset ? (int)offset[1] : 0;
    }
    __device__ __forceinline__ int row(int y) const { return min(max(y + dy, 0), height - 1) * width; }
    __device__ __forceinline__ int column(int x) const { return min(max(x + dx, 0), width - 1); }
};

// The first layer, straight from the image in global memory: (height, width, 16).
template <typename T>
__device__ void first_layer(const T* image, const Window& window, int out_width, int stride, const uint4* weights,
                            float centre, const Finish& finish) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, q = lane & 3;
    uint4 b[18];
#pragma unroll
    for (int i = 0; i < 18; i++) b[i] = weights[(i >> 1) * 64 + lane * 2 + (i & 1)];
    for (int first = warp * 16; first < finish.pixels; first += WARPS * 16) {
        float sum[4][4] = {};
        u32 gate[2] = {finish.gate(first, 0), finish.gate(first, 1)};
        int row[2][3], column[2][3];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int p = min(finish.pixel(first, half), finish.pixels - 1), y = p / out_width, x = p - y * out_width;
#pragma unroll
            for (int k = 0; k < 3; k++) row[half][k] = window.row(y * stride + k), column[half][k] = window.column(x * stride + k);
        }
#pragma unroll
        for (int tap = 0; tap < 9; tap++) {
            uint2 upper = channels(image + (row[0][tap / 3] + column[0][tap % 3]) * 16 + 4 * q, centre);
            uint2 lower = channels(image + (row[1][tap / 3] + column[1][tap % 3]) * 16 + 4 * q, centre);
            u32 a[4] = {upper.x, lower.x, upper.y, lower.y};
            mma(sum[0], a, b[2 * tap].x, b[2 * tap].y);
            mma(sum[1], a, b[2 * tap].z, b[2 * tap].w);
            mma(sum[2], a, b[2 * tap + 1].x, b[2 * tap + 1].y);
            mma(sum[3], a, b[2 * tap + 1].z, b[2 * tap + 1].w);
        }
        finish(sum, first, gate[0], 0);
        finish(sum, first, gate[1], 1);
    }
}

// A layer from shared memory to shared memory, 32 channels to 32. Forward, output (y, x) reads inputs (y + ky, x + kx);
// BACK, it reads (y - ky, x - kx) of a gradient two pixels smaller, or zeros outside of it.
template <bool BACK>
__device__ void inner_layer(u32 from, u32 zeros, u32 weights, int height, int width, int out_width, const Finish& finish) {
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, chunk = lane >> 4;
    for (int first = warp * 16; first - warp % 4 * 16 < finish.pixels; first += WARPS * 16) {  // the warpgroup together
        float sum[4][4] = {};
        u32 a[2][2][4];  // [tap % 2][16 channels]: the next tap's arrive during this one's products
        u32 gate[2] = {finish.gate(first, 0), finish.gate(first, 1)};
        int p = min(first + (lane & 15), finish.pixels - 1), y = p / out_width, x = p - y * out_width;
#pragma unroll
        for (int tap = 0; tap < 9; tap++) {
            int ky = tap / 3, kx = tap % 3;
            u32 address;
            if (BACK) {
                bool inside = (u32)(y - ky) < (u32)height && (u32)(x - kx) < (u32)width;
                address = inside ? from + place(((y - ky) * width + x - kx) * 4 + chunk) : zeros + chunk * 16;
            } else {
                address = from + place(((y + ky) * width + x + kx) * 4 + chunk);
            }
            ldmatrix(a[tap & 1][0], address);
            ldmatrix(a[tap & 1][1], address ^ 32);  // channels 16-31: two units further
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
            wgmma(sum, a[tap & 1][0], weights + tap * 2048);
            wgmma(sum, a[tap & 1][1], weights + tap * 2048 + 1024);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            if (tap < 8) asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        finish(sum, first, gate[0], 0);
        finish(sum, first, gate[1], 1);
    }
}

// A layer's 9 x 2 blocks of packed weights, for all threads to see. Nobody may still be reading the ones before.
__device__ void load_weights(const uint4* from, u32 to) {
    for (int i = threadIdx.x; i < 18 * 64; i += THREADS) copy_async(to + i * 16, from + i);
    asm volatile("cp.async.commit_group; cp.async.wait_group 0; fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
}

__device__ void copy_out(u32 from, u16* to, int pixels) {
#pragma unroll 4
    for (int i = threadIdx.x; i < pixels * 4; i += THREADS) ((uint4*)to)[i] = load(from + place(i));
}

// offsets: row i is image i % sources, seen through the window at offsets[i]; or null. weights: see kernels.py. kept: the layers' outputs but the
// last, one after the other, each (n + t, height, width, 32); positive: all layers' gates, each (n, height, width). Both
// null when no backward pass will follow.
template <typename T>
__device__ void encode(const T* images, int sources, const long long* offsets, const u16* tangents, const uint4* weights,
                       const float* bias, u16* kept, u32* positive, u16* features, int n, int t, int height, int width,
                       int stride, int layers, int last_relu, float scale, float centre) {
    int h0 = (height - 3) / stride + 1, w0 = (width - 3) / stride + 1;
    u32 own_weights = shared_base(), base = own_weights + 18 * 1024 + 128;
    u32 buffer[2] = {base, base + ((h0 * w0 * 64 + 127) & ~127)};
    int i = blockIdx.x, size = height * width * 16;
    for (int tangent = 0; tangent <= (i < t); tangent++) {
        u16* keep = kept;
        u32* gates = positive;
        const uint4* w = weights;
        int h = h0, v = w0;
        for (int layer = 0; layer < layers; layer++) {
            bool gated = layer < layers - 1 || last_relu;
            u32* own = gates ? gates + (size_t)i * h * v : nullptr;
            Job job{h * v, layer == 0 ? scale : 1.f, tangent ? nullptr : bias + layer * 32, !tangent && gated,
                    tangent && gated ? own : nullptr, tangent ? nullptr : own, buffer[layer & 1]};
            if (layer == 0) {
                Window window(height, width, offsets && !tangent ? offsets + 2 * i : nullptr);
                if (tangent) first_layer(tangents + (size_t)i * size, window, v, stride, w, 0.f, Finish(job));
                else first_layer(images + (size_t)(i % sources) * size, window, v, stride, w, centre, Finish(job));
                w += 9 * 64;
            } else {
                load_weights(w, own_weights);
                inner_layer<false>(buffer[~layer & 1], 0, own_weights, h + 2, v + 2, v, Finish(job));
                w += 18 * 64;
            }
            __syncthreads();
            u16* out = layer == layers - 1 ? features : keep;
            if (out) copy_out(buffer[layer & 1], out + (size_t)(tangent ? n + i : i) * h * v * 32, h * v);
            if (keep) keep += (size_t)(n + t) * h * v * 32, gates += (size_t)n * h * v;
            h -= 2, v -= 2;
        }
        __syncthreads();
    }
}

#define ENCODE(NAME, T)                                                                                               \
    extern "C" __global__ void __launch_bounds__(THREADS, 1) NAME(                                                    \
        const T* images, int sources, const long long* offsets, int shifted, const u16* tangents,                    \
        const uint4* weights, const float* bias, u16* kept, u32* positive, u16* features, int n, int t, int height,  \
        int width, int stride, int layers, int last_relu, int keep, double scale, double centre) {                   \
        encode(images, sources, shifted ? offsets : nullptr, tangents, weights, bias, keep ? kept : nullptr,         \
               keep ? positive : nullptr, features, n, t, height, width, stride, layers, last_relu, (float)scale,    \
               (float)centre);                                                                                       \
    }
ENCODE(encode_bytes, u8)
ENCODE(encode_bf16, u16)

// The gradient at every layer's sums, from that at the features: (rows, height, width, 32) per layer, first layer first.
// height, width: of the first layer's output.
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    descend(const u16* gradient, const u32* positive, const uint4* weights, u16* gradients, int n, int t, int height,
            int width, int layers, int last_relu) {
    u32 own_weights = shared_base(), zeros = own_weights + 18 * 1024;
    u32 buffer[2] = {zeros + 128, zeros + 128 + ((height * width * 64 + 127) & ~127)};
    if (threadIdx.x < 4) store(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
    int row = blockIdx.x, own = row < n ? row : row - n, h = height, v = width;
    size_t before = 0;  // pixels of an image in the layers before the present one
    for (int layer = 0; layer < layers - 1; layer++, h -= 2, v -= 2) before += h * v;
    const uint4* g = (const uint4*)gradient + (size_t)row * h * v * 4;
    const u32* gates = positive + n * before + (size_t)own * h * v;
    uint4* out = (uint4*)gradients + ((n + t) * before + (size_t)row * h * v) * 4;
#pragma unroll 4
    for (int i = threadIdx.x; i < h * v * 4; i += THREADS) {
        uint4 value = g[i];
        if (last_relu) {
            u32 own = gates[i >> 2];
            int n = i & 3;
            value.x &= mask(own, n, 0), value.y &= mask(own, n, 1), value.z &= mask(own, n, 2), value.w &= mask(own, n, 3);
        }
        store(buffer[(layers - 1) & 1] + place(i), value);
        out[i] = value;
    }
    __syncthreads();
    for (int layer = layers - 1; layer > 0; layer--) {
        h += 2, v += 2;
        before -= h * v;
        const u32* own_gates = positive + n * before + (size_t)own * h * v;
        Job job{h * v, 1.f, nullptr, false, own_gates, nullptr, buffer[~layer & 1]};
        load_weights(weights + (layer - 1) * 18 * 64, own_weights);
        inner_layer<true>(buffer[layer & 1], zeros, own_weights, h - 2, v - 2, v, Finish(job));
        __syncthreads();
        copy_out(job.to, gradients + ((n + t) * before + (size_t)row * h * v) * 32, h * v);
    }
}

// One layer's weight gradient: sum over pixels of gradient (32) x input at a tap (CHANNELS). Pixels are the inner
// dimension, so both operands are read transposed. Strips of rows arrive while the one before is worked on.
__device__ void load_strip(const u16* from, u32 to, int units) {
    for (int i = threadIdx.x; i < units; i += WEIGH_THREADS) copy_async(to + place(i), (const uint4*)from + i);
}

// Bytes have to become bf16 on the way: they are fetched into registers before the work on a strip, and stored after.
struct Bytes {
    static constexpr int MOST = 10;  // of 8 bytes per thread: strips of up to 30,720 bytes
    uint2 v[MOST];

    __device__ __forceinline__ void fetch(const u8* image, const Window& window, int top, int units) {
        int y = threadIdx.x / 2 / window.width, x = threadIdx.x / 2 - y * window.width;
        int down = WEIGH_THREADS / 2 / window.width, right = WEIGH_THREADS / 2 - down * window.width;
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            if ((int)threadIdx.x + i * WEIGH_THREADS < units)
                v[i] = ((const uint2*)image)[(window.row(top + y) + window.column(x)) * 2 + (threadIdx.x & 1)];
            y += down, x += right;
            if (x >= window.width) y++, x -= window.width;
        }
    }

    __device__ __forceinline__ void put(u32 to, int units, float centre) const {
#pragma unroll
        for (int i = 0; i < MOST; i++) {
            int unit = threadIdx.x + i * WEIGH_THREADS;
            if (unit >= units) continue;
            uint2 low = channels(v[i].x, centre), high = channels(v[i].y, centre);
            store(to + place(unit), make_uint4(low.x, low.y, high.x, high.y));
        }
    }
};

template <typename T, int CHANNELS>
__device__ void weigh(const T* inputs, int sources, const long long* offsets, const u16* tangents, const u16* gradients,
                      float* weight_sums, float* bias_sums, int n, int t, int height, int width, int out_height,
                      int out_width, int stride, float centre) {
    constexpr int UNITS = CHANNELS / 8;  // of a pixel; also tiles of 8 columns
    constexpr bool BYTES = sizeof(T) == 1;
    u32 g_bytes = (STRIP * out_width * 64 + 127) & ~127;
    u32 a_bytes = (((STRIP - 1) * stride + 3) * width * UNITS * 16 + 127) & ~127;
    u32 zeros = shared_base(), base = zeros + 128;
    if (threadIdx.x < 4) store(zeros + threadIdx.x * 16, make_uint4(0, 0, 0, 0));
    int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, group = warp % GROUPS, ky = warp / GROUPS;
    int strips = (out_height + STRIP - 1) / STRIP;
    int count = (n + t - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x * strips;
    float sum[3][2][UNITS][4] = {}, bias[2][4] = {};
    Bytes bytes;

    struct Strip {
        int row, high, units;  // row of the batch; output rows; 16-byte units of input
        u32 g, a;              // where it lies in shared memory
        int top;               // first row of the input, in an image
    };
    auto strip = [&](int k) {
        int y = k % strips * STRIP, high = min(STRIP, out_height - y);
        u32 g = base + (k & 1) * (g_bytes + a_bytes);
        return Strip{(int)(blockIdx.x + k / strips * gridDim.x), high, ((high - 1) * stride + 3) * width * UNITS, g,
                     g + g_bytes, y * stride};
    };
    size_t size = (size_t)height * width * CHANNELS;
    auto issue = [&](int k) {
        if (k < count) {
            Strip s = strip(k);
            size_t first = (size_t)s.row * out_height + k % strips * STRIP;
            load_strip(gradients + first * out_width * 32, s.g, s.high * out_width * 4);
            size_t start = (size_t)s.top * width * CHANNELS;
            if (s.row >= n) {
                load_strip(tangents + (s.row - n) * size + start, s.a, s.units);
            } else if constexpr (BYTES) {
                Window window(height, width, offsets ? offsets + 2 * s.row : nullptr);
                bytes.fetch(inputs + s.row % sources * size, window, s.top, s.units);
            } else {
                load_strip(inputs + s.row * size + start, s.a, s.units);
            }
        }
        asm volatile("cp.async.commit_group;");
    };
    auto settle = [&](int k) {
        if (!BYTES || k >= count) return;
        Strip s = strip(k);
        if (s.row < n) bytes.put(s.a, s.units, centre);
    };

    issue(0);
    settle(0);
    for (int k = 0; k < count; k++) {
        issue(k + 1);
        asm volatile("cp.async.wait_group 1;" ::: "memory");
        __syncthreads();
        Strip s = strip(k);
        int pixels = s.high * out_width;
        u32 one = s.row < n ? 0x3f803f80 : 0;  // two bf16; tangents have no bias
        for (int first = group * 16; first < pixels; first += GROUPS * 16) {
            u32 a[2][4];
            int p = first + ((lane >> 4) << 3) + (lane & 7);
#pragma unroll
            for (int m = 0; m < 2; m++)
                ldmatrix_transposed(a[m], p < pixels ? s.g + place(p * 4 + m * 2 + ((lane >> 3) & 1)) : zeros);
            p = min(first + (((lane >> 3) & 1) << 3) + (lane & 7), pixels - 1);
            int y = p / out_width, corner = (y * width + p - y * out_width) * stride + ky * width;
#pragma unroll
            for (int kx = 0; kx < 3; kx++)
#pragma unroll
                for (int pair = 0; pair < UNITS / 2; pair++) {
                    u32 b[4];
                    ldmatrix_transposed(b, s.a + place((corner + kx) * UNITS + pair * 2 + (lane >> 4)));
#pragma unroll
                    for (int m = 0; m < 2; m++) {
                        mma(sum[kx][m][2 * pair], a[m], b[0], b[1]);
                        mma(sum[kx][m][2 * pair + 1], a[m], b[2], b[3]);
                    }
                }
            if (ky == 0) {
                mma(bias[0], a[0], one, one);
                mma(bias[1], a[1], one, one);
            }
        }
        settle(k + 1);
        __syncthreads();
    }

    int slot = blockIdx.x * GROUPS + group, q = lane & 3;
#pragma unroll
    for (int m = 0; m < 2; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int filter = m * 16 + half * 8 + (lane >> 2);
#pragma unroll
            for (int kx = 0; kx < 3; kx++)
#pragma unroll
                for (int u = 0; u < UNITS; u++) {
                    float* to = weight_sums + ((slot * 9 + ky * 3 + kx) * 32 + filter) * CHANNELS + 8 * u + 2 * q;
                    *(float2*)to = make_float2(sum[kx][m][u][2 * half], sum[kx][m][u][2 * half + 1]);
                }
            if (ky == 0 && q == 0) bias_sums[slot * 32 + filter] = bias[m][2 * half];
        }
}

#define WEIGH(NAME, T, CHANNELS)                                                                                      \
    extern "C" __global__ void __launch_bounds__(WEIGH_THREADS, 1) NAME(                                              \
        const T* inputs, int sources, const long long* offsets, int shifted, const u16* tangents,                    \
        const u16* gradients, float* weight_sums, float* bias_sums, int n, int t, int height, int width,             \
        int out_height, int out_width, int stride, double centre) {                                                  \
        weigh<T, CHANNELS>(inputs, sources, shifted ? offsets : nullptr, tangents, gradients, weight_sums, bias_sums, \
                           n, t, height, width, out_height, out_width, stride, (float)centre);                       \
    }
WEIGH(weigh_bytes, u8, 16)
WEIGH(weigh_bf16, u16, 16)
WEIGH(weigh_inner, u16, 32)

// All layers' weights, one after the other as torch has them, (32, c, 3, 3) for the first and (32, 32, 3, 3) for the
// others -> bf16 in the order that pack_weights in kernels.py defines: for the first layer that of mma's B fragments, for
// the others blocks of 8 filters x 8 channels. `back`: the inner layers' alone, inputs and filters exchanged.
extern "C" __global__ void pack_weights(const float* weights, u16* packed, int channels, int layers, int back) {
    int first = back ? 0 : 9 * 512, i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= first + (layers - 1) * 18 * 512) return;
    int j = i < first ? i : (i - first) % (18 * 512), layer = i < first ? 0 : 1 + (i - first) / (18 * 512);
    int step = j >> 9, tap = layer ? step >> 1 : step, column, row;
    if (layer) column = 8 * (j >> 7 & 3) + (j >> 3 & 7), row = 16 * (step & 1) + 8 * (j >> 6 & 1) + (j & 7);
    else column = 8 * (j >> 2 & 3) + (j >> 6 & 7), row = 4 * (j >> 4 & 3) + (j & 3);
    int filter = back ? row : column, channel = back ? column : row;
    float value = 0.f;
    if (layer) value = weights[32 * channels * 9 + ((layer - 1) * 1024 + filter * 32 + channel) * 9 + tap];
    else if (channel < channels) value = weights[(filter * channels + channel) * 9 + tap];
    packed[i] = (u16)pack(value, 0.f);
}

// (n, c, h, w) bytes -> (n, h, w, 16).
extern "C" __global__ void pixels_last(const u8* from, uint4* to, int channels, int pixels) {
    int p = blockIdx.x * blockDim.x + threadIdx.x;
    if (p >= pixels) return;
    const u8* image = from + (size_t)blockIdx.y * channels * pixels + p;
    u32 v[4] = {};
#pragma unroll
    for (int c = 0; c < 16; c++)
        if (c < channels) v[c / 4] |= (u32)image[c * pixels] << (c % 4 * 8);
    to[(size_t)blockIdx.y * pixels + p] = make_uint4(v[0], v[1], v[2], v[3]);
}

// Windows (n, c, size, size) of images (n, c, height, width) at offsets (n, 2), borders repeated; size divisible by 4.
extern "C" __global__ void crop_bytes(const u8* from, const long long* offsets, u32* to, int channels, int height,
                                      int width, int size) {
    int i = blockIdx.x * blockDim.x + threadIdx.x, quarter = size / 4;
    if (i >= channels * size * quarter) return;
    int x = i % quarter * 4, y = i / quarter % size, c = i / quarter / size, n = blockIdx.y;
    int sy = min(max(y + (int)offsets[2 * n], 0), height - 1), sx = x + (int)offsets[2 * n + 1];
    const u8* row = from + ((size_t)(n * channels + c) * height + sy) * width;
    u32 v = 0;
#pragma unroll
    for (int k = 0; k < 4; k++) v |= (u32)row[min(max(sx + k, 0), width - 1)] << 8 * k;
    to[(size_t)n * channels * size * quarter + i] = v;
}
