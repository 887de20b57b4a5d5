// The kernels of matrix products: the work of one thread. stages.cpp divides it between threads.
#pragma once
#include "activation.h"
#include "dispatch.h"
#include "matrix.h"

namespace ridgeline {

enum class NormKind { none, rms, layer };

struct NormWeights {
    NormKind kind = NormKind::none;
    float eps = 0;
    const float* weight = nullptr;  // includes an RMS norm's offset
    const float* bias = nullptr;
};

// The input of a product: norm(x + scale * delta). The sum may be kept.
struct Source {
    const float* x;
    int64_t stride;
    int64_t k;
    const int64_t* rows = nullptr;  // token i is row rows[i] of x and delta; null: row i
    const float* delta = nullptr;   // or null
    int64_t delta_stride = 0;
    float scale = 1;
    float* residual = nullptr;  // null, or receives row i of x + scale * delta; it needs a delta
    int64_t residual_stride = 0;
    NormWeights norm;
};

struct SourceKernels {
    // Returns token i after the norm: in `room` [k], or in x itself if nothing changes it. keep: write the sum.
    const float* (*prepare)(const Source&, int64_t i, float* room, bool keep);
    // Writes tokens first .. first + n (one unit: n <= 4, first a multiple of 4) to the activations.
    void (*load)(const Activations&, const Matrix&, const float* const* tokens, int64_t first, int n);
    void (*norm)(const NormWeights&, const float* x, int64_t n, float* out);
};
RL_TABLE(SourceKernels, source_kernels)

struct PanelKernels {
    // Rows as stored into one panel. room: `pack_room` bytes. False if the matrix's format cannot hold a number.
    bool (*pack)(Matrix&, int64_t panel, const SourceRows* parts, char* room);
    size_t (*pack_room)(const Matrix&);
    // One row, as float32: what the products mean.
    void (*unpack)(const Matrix&, int64_t panel, int row, float* out);
    // A stored row, as float32.
    void (*widen)(const SourceRows&, int64_t row, int64_t k, float* out);
};
RL_TABLE(PanelKernels, panel_kernels)

// What becomes of a finished tile: scale, soft cap; or an activation; then it is stored, part by part.
struct Epilogue {
    enum Kind { plain, unary, gated } kind = plain;
    Gate gate;
    float scale = 1, softcap = 0;  // of plain ones; 0: none
    struct Out {
        float* data;
        int64_t stride;
    };
    static constexpr int PARTS = 6;
    Out out[PARTS];  // of each part of the matrix; of a gated one, the first
};

constexpr int64_t FEW_TILES = 8;  // tiles whose computation still takes less time than fetching a panel

struct ProductKernels {
    int tile;           // tokens
    bool splits_pairs;  // whether tokens of plain bytes have a surplus
    // Panels [begin, end) times all tokens. room: `room_bytes` of this thread.
    void (*multiply)(const Matrix&, const Activations&, int64_t begin, int64_t end, const Epilogue&, char* room);
    size_t (*room_bytes)(const Matrix&, const Activations&);
};
RL_TABLE(ProductKernels, product_kernels)

}  // namespace ridgeline
