// The kernel for one instruction set. The build compiles this file twice for each, with the
// compiler flags of that set and MULTIHEAD_UNIT naming the table that it defines: once with the
// tile that is fastest, and once, with MULTIHEAD_NARROW, with a tile of one vector for calls of
// few queries. A row's bits are the same in both: its arithmetic stays within its lane.
//
// Code here must not leave weak symbols: the linker keeps one copy of those, and it could be the
// one with instructions that the processor lacks. So: anonymous namespaces, and nothing of the
// C++ standard library but integer types.

#include <stddef.h>
#include <stdint.h>

#include "unit.h"

#define INLINE inline __attribute__((always_inline))
#define INLINE_LAMBDA __attribute__((always_inline))
#define NOINLINE __attribute__((noinline, unused))
#define UNROLL _Pragma("GCC unroll 16")

#if defined(MULTIHEAD_AVX512)
#include "vec_avx512-inl.h"
#elif defined(MULTIHEAD_AVX2)
#include "vec_avx2-inl.h"
#else
#include "vec_generic-inl.h"
#endif

#include "math-inl.h"
#include "convert-inl.h"
#include "scratch-inl.h"
#include "product-inl.h"
#ifdef MULTIHEAD_PAIRS
#include "pairs_avx512bf16-inl.h"
#endif
#include "mask-inl.h"
#include "operands-inl.h"
#include "softmax-inl.h"
#include "finish-inl.h"
#include "tile-inl.h"
#include "pooling-inl.h"
#ifdef MULTIHEAD_TILES
#include "tiles_amx-inl.h"
#endif
#include "forward-inl.h"
#if defined(MULTIHEAD_NARROW) && !defined(MULTIHEAD_PAIRS)
#include "held-inl.h"
#include "decode-inl.h"
#endif
#ifndef MULTIHEAD_NARROW
#include "sweep-inl.h"
#include "rotate-inl.h"
#endif
#include "peak-inl.h"

namespace multihead {

namespace {

// Measured with float32 on AVX-512, and with bfloat16 in AMX tiles, which compute faster.
#ifdef MULTIHEAD_TILES
constexpr int kFewRows = kTile / 4;
#else
constexpr int kFewRows = kTile / 2;
#endif
constexpr Pooler kPooler = {item_pool_bytes, finish_map};
#if defined(MULTIHEAD_NARROW) && !defined(MULTIHEAD_PAIRS)
constexpr Decoder kDecoder = {kChunkKeys, decode_scratch_bytes, part_bytes, decode, finish_decode};
#else
constexpr Decoder kDecoder = {};
#endif
#ifdef MULTIHEAD_NARROW
constexpr decltype(Unit::rotate) kRotate = nullptr;
#else
constexpr decltype(Unit::rotate) kRotate = rotate;
#endif
#if defined(MULTIHEAD_NARROW)
constexpr Sweeper kSweeper = {};
#elif defined(MULTIHEAD_TILES)
constexpr Sweeper kSweeper = {kKeyBlock, sweep_scratch_bytes<TileProduct>, place_columns,
                              sweep_in_tiles};
#elif defined(MULTIHEAD_PAIRS)
constexpr Sweeper kSweeper = {kKeyBlock, sweep_scratch_bytes<PairProduct>, place_columns,
                              sweep<PairProduct>};
#else
constexpr Sweeper kSweeper = {kKeyBlock, sweep_scratch_bytes<FloatProduct>, place_columns,
                              sweep<FloatProduct>};
#endif

}  // namespace

#if defined(MULTIHEAD_TILES)
extern const Unit MULTIHEAD_UNIT = {
    kTile, kFewRows, scratch_bytes<TileProduct>, forward_in_tiles, Instruction::tdpbf16, peak_of_tiles,
    kPooler, kDecoder, kSweeper, kRotate};
#elif defined(MULTIHEAD_PAIRS)
extern const Unit MULTIHEAD_UNIT = {
    kTile, kFewRows, scratch_bytes<PairProduct>, forward<PairProduct>, Instruction::dpbf16,
    peak<PairProduct>, kPooler, kDecoder, kSweeper, kRotate};
#else
extern const Unit MULTIHEAD_UNIT = {
    kTile, kFewRows, scratch_bytes<FloatProduct>, forward<FloatProduct>, Instruction::fma,
    peak<FloatProduct>, kPooler, kDecoder, kSweeper, kRotate};
#endif

}  // namespace multihead
