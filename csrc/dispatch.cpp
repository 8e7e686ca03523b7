#include "dispatch.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>

#include "isa/unit.h"
#include "parallel.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace multihead {

extern const Unit unit_baseline, unit_baseline_narrow;
#if defined(__x86_64__)
extern const Unit unit_avx2, unit_avx2_narrow, unit_avx512, unit_avx512_narrow;
extern const Unit unit_avx512_bf16, unit_avx512_bf16_narrow;
extern const Unit unit_avx512_amx, unit_avx512_amx_narrow;
#endif

namespace {

struct Entry {
  const char* name;
  const Unit *unit, *narrow;  // narrow: for calls whose rows fit a vector or two
  bool (*runs)();
};

bool always() { return true; }
#if defined(__x86_64__)
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool runs_avx512() {
  return runs_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
bool runs_avx512_bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16"); }

// Whether all of `bits` are set in EDX of CPUID's leaf of extended features.
bool has_features(unsigned bits) {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) && (edx & bits) == bits;
}

bool has_amx() {
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return has_features(kAmxBf16 | kAmxTile);
}

// Intel's processors with tiles run dpbf16ps at half the rate of a float32 FMA. They all have
// AVX-512-FP16, which a virtual machine shows also where it hides the tiles.
bool has_slow_dpbf16() {
  constexpr unsigned kAvx512Fp16 = 1u << 23;
  return __builtin_cpu_is("intel") && has_features(kAvx512Fp16);
}

// Linux lets a process use tiles, 8 KiB of state for each thread, once it has asked; it may refuse.
bool may_use_tiles() {
#if defined(__linux__)
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  static const bool granted = syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
  return granted;
#else
  return false;
#endif
}
[[maybe_unused]] bool runs_avx512_amx() {
  return runs_avx512_bf16() && has_amx() && may_use_tiles();
}
#else
bool has_slow_dpbf16() { return false; }
#endif

const Entry entries[] = {
    {"baseline", &unit_baseline, &unit_baseline_narrow, always},
#ifdef MULTIHEAD_HAS_AVX2
    {"avx2", &unit_avx2, &unit_avx2_narrow, runs_avx2},
#endif
#ifdef MULTIHEAD_HAS_AVX512
    {"avx512", &unit_avx512, &unit_avx512_narrow, runs_avx512},
#endif
#ifdef MULTIHEAD_HAS_AVX512_BF16
    {"avx512_bf16", &unit_avx512_bf16, &unit_avx512_bf16_narrow, runs_avx512_bf16},
#endif
#ifdef MULTIHEAD_HAS_AVX512_AMX
    {"avx512_amx", &unit_avx512_amx, &unit_avx512_amx_narrow, runs_avx512_amx},
#endif
};
constexpr int kEntries = sizeof entries / sizeof entries[0];

// Index of a set that runs here, -1 where it does not or the name is unknown.
int index_of(const std::string& name) {
  for (int i = 0; i < kEntries; ++i)
    if (name == entries[i].name && entries[i].runs()) return i;
  return -1;
}

std::string listing() {
  std::string names;
  for (const std::string& name : instruction_sets()) names += (names.empty() ? "" : ", ") + name;
  return names;
}

int index_or_throw(const std::string& name, const char* source) {
  if (name.empty()) return -1;
  const int index = index_of(name);
  if (index < 0)
    throw std::invalid_argument(std::string(source) + " names the instruction set '" + name +
                                "'; this processor and build have " + listing());
  return index;
}

std::atomic<int>& choice() {
  static std::atomic<int> chosen = [] {
    const char* name = std::getenv("MULTIHEAD_ISA");
    return index_or_throw(name ? name : "", "MULTIHEAD_ISA");
  }();
  return chosen;
}

std::atomic<bool> decoder_is_on{true};

bool serves(const Entry& entry, Dtype dtype) {
  return dtype == Dtype::bfloat16 || entry.unit->instruction == Instruction::fma;
}

int best_for(Dtype dtype) {
  // Where dpbf16ps is slow, bfloat16 that is widened once a block is twice as fast.
  for (int i = kEntries - 1; i > 0; --i) {
    if (entries[i].unit->instruction == Instruction::dpbf16 && has_slow_dpbf16()) continue;
    if (serves(entries[i], dtype) && entries[i].runs()) return i;
  }
  return 0;
}

const Entry& entry_for(Dtype dtype) {
  static const int best[2] = {best_for(Dtype::float32), best_for(Dtype::bfloat16)};
  const int chosen = choice().load(std::memory_order_relaxed);
  if (chosen >= 0 && serves(entries[chosen], dtype)) return entries[chosen];
  return entries[best[dtype == Dtype::bfloat16]];
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};

// Keys that a row sees, from above: masks without a closed form count as dense.
double visible_keys(const ForwardArgs& a) {
  const Mask& mask = a.mask;
  const double keys = double(a.key_length);
  const bool near = mask.has_left && mask.has_right && !mask.left.data && !mask.right.data;
  const bool far = mask.keep_first.data || mask.keep_first.value || mask.prefix.data ||
                   mask.prefix.value;
  if (!near || far) return keys;
  return std::min(keys, double(mask.left.value) + mask.right.value + 1);
}

// Some 10 to 25 microseconds of one core: less is not worth handing to another thread.
constexpr double kMultiplyAdds = 1e6, kBytesRead = 2.5e5;

int worth_threads(double work, double of_one, int threads) {
  return work / of_one < threads ? std::max(1, int(work / of_one)) : threads;
}

// Memory for `threads` threads, each from a page of its own.
class Workspace {
 public:
  Workspace(size_t bytes, int64_t count)
      : bytes_((bytes + 4095) / 4096 * 4096),
        memory_(bytes ? static_cast<char*>(std::aligned_alloc(4096, bytes_ * count)) : nullptr) {
    if (bytes && !memory_) throw std::bad_alloc();
  }
  void* of(int64_t thread) const { return memory_.get() + bytes_ * thread; }

 private:
  size_t bytes_;
  std::unique_ptr<char, Free> memory_;
};

// Tiles of an item share the block of K and V that is in the cache, and its copy where one is
// needed; but every thread should get several items. No result depends on it.
int64_t tiles_per_item(const ForwardArgs& a, const Unit& unit, int64_t tiles, int64_t groups,
                       int threads) {
  // V is transposed once an item for tdpbf16ps: more of its small tiles should share that.
  const int64_t most = unit.instruction == Instruction::tdpbf16 ? 32 : 8;
  constexpr double kTileBytes = 512 * 1024;  // queries and outputs of an item, in half the L2
  const int64_t fair = groups * tiles / (8 * threads);
  const int64_t fits =
      int64_t(kTileBytes / (double(a.head_dim + a.value_dim) * unit.tile_rows * sizeof(float)));
  return std::max<int64_t>(1, std::min({most, fair, fits, tiles}));
}

// Item n of the groups of `heads` heads that the call's heads are split into.
WorkItem item_of(const ForwardArgs& a, int64_t n, int64_t heads, int64_t first_row) {
  const int64_t groups = a.heads / heads;
  return {n / groups, n % groups * heads, heads, first_row};
}

// Tiles of queries go through the keys that they may see.
void prefill(ForwardArgs args, const Entry& entry, int threads) {
  // Where one head's queries leave a tile half empty, those of its whole group lie side by side.
  // A map is of one head.
  const bool together = args.query_length < entry.unit->tile_rows && !args.map.mass;
  const int64_t heads = together ? args.heads / args.kv_heads : 1;
  const int64_t rows = heads * args.query_length;
  const bool narrow =
      rows <= entry.narrow->tile_rows ||
      (rows <= 2 * entry.narrow->tile_rows && 2 * entry.narrow->tile_rows < entry.unit->tile_rows);
  const Unit& unit = narrow ? *entry.narrow : *entry.unit;
  const int64_t groups = args.batch * args.heads / heads;
  const int64_t tiles = (rows + unit.tile_rows - 1) / unit.tile_rows;
  const double work = double(groups) * rows * visible_keys(args) * (args.head_dim + args.value_dim);
  threads = worth_threads(work, kMultiplyAdds, threads);
  args.tiles_per_item = tiles_per_item(args, unit, tiles, groups, threads);

  const int64_t parts = (tiles + args.tiles_per_item - 1) / args.tiles_per_item;
  threads = int(std::min<int64_t>(threads, groups * parts));
  if (threads < 1) return;
  const Workspace scratch(unit.scratch_bytes(args), threads);
  const size_t pool_bytes = args.map.mass ? unit.pooler.item_bytes(args) : 0;
  const Workspace pools(pool_bytes * parts, groups);
  for_each_item(groups * parts, threads, [&](int64_t n, int thread) {
    // Later queries see more keys under a causal mask: the longest items first, of all heads.
    const int64_t part = parts - 1 - n / groups, group = n % groups;
    const int64_t first_row = part * args.tiles_per_item * unit.tile_rows;
    char* pool = static_cast<char*>(pools.of(group)) + part * pool_bytes;
    unit.forward(args, item_of(args, group, heads, first_row), scratch.of(thread),
                 args.map.mass ? pool : nullptr);
  });
  if (!args.map.mass) return;
  for (int64_t group = 0; group < groups; ++group)
    unit.pooler.finish(args, group / args.heads, group % args.heads, pools.of(group), parts);
}

// Few rows, which fit a tile together with all of their group, go through chunks of the keys.
void decode(const ForwardArgs& args, const Decoder& decoder, int threads) {
  const int64_t heads = args.heads / args.kv_heads, groups = args.batch * args.kv_heads;
  const int64_t chunks =
      std::max<int64_t>(1, (args.key_length + decoder.chunk_keys - 1) / decoder.chunk_keys);
  const double bytes = double(groups) * visible_keys(args) * (args.head_dim + args.value_dim) *
                       (args.held.dtype == Dtype::int8      ? 1
                        : args.held.dtype == Dtype::float32 ? 4
                                                            : 2);
  threads = worth_threads(bytes, kBytesRead, threads);
  threads = int(std::min<int64_t>(threads, groups * chunks));
  if (threads < 1) return;
  const Workspace scratch(decoder.scratch_bytes(args), threads);
  const int64_t part_bytes = int64_t(decoder.part_bytes(args));
  // One chunk is finished at once; the parts of several are kept until all are there.
  const bool whole = chunks == 1;
  const Workspace parts(part_bytes * (whole ? 1 : chunks), whole ? threads : groups);
  for_each_item(groups * chunks, threads, [&](int64_t n, int thread) {
    const int64_t group = n / chunks, chunk = n % chunks;
    const WorkItem item = item_of(args, group, heads, 0);
    char* all = static_cast<char*>(parts.of(whole ? thread : group));
    decoder.decode(args, item, chunk, scratch.of(thread), all + chunk * part_bytes);
    if (whole) decoder.finish(args, item, scratch.of(thread), all, 1);
  });
  if (whole) return;
  for_each_item(groups, threads, [&](int64_t group, int thread) {
    decoder.finish(args, item_of(args, group, heads, 0), scratch.of(thread), parts.of(group),
                   chunks);
  });
}

}  // namespace

std::vector<std::string> instruction_sets() {
  std::vector<std::string> names;
  for (const Entry& entry : entries)
    if (entry.runs()) names.push_back(entry.name);
  return names;
}

void use_instruction_set(const std::string& name) {
  choice().store(index_or_throw(name, "use_instruction_set"));
}

bool decodes(Dtype dtype, int64_t heads, int64_t kv_heads, int64_t query_length) {
  // From shapes and dtype alone: a row's bits must not depend on the batch around it.
  if (kv_heads == 0) return false;
  const bool few = heads / kv_heads * query_length <= entry_for(dtype).narrow->few_rows;
  return few && decoder_is_on.load(std::memory_order_relaxed);
}

void use_decoder(bool on) { decoder_is_on.store(on, std::memory_order_relaxed); }

std::string instruction_set_for(Dtype dtype) { return entry_for(dtype).name; }

void forward(const ForwardArgs& args, int threads) {
  if (args.batch * args.heads * args.query_length == 0) return;
  const Entry& entry = entry_for(args.dtype);
  if (!args.map.mass && decodes(args.dtype, args.heads, args.kv_heads, args.query_length))
    decode(args, entry_for(Dtype::float32).narrow->decoder, threads);
  else
    prefill(args, entry, threads);
}

void sweep(SweepArgs args, int threads) {
  const ForwardArgs& a = args.call;
  const int64_t heads = a.batch * a.heads, rows = args.edges[args.bins] - args.edges[0];
  if (heads * a.key_length * rows == 0) return;
  const Unit& unit = *entry_for(a.dtype).unit;
  const int64_t tile = unit.tile_rows, block = unit.sweeper.block_keys;
  args.first_tile = args.edges[0] / tile;
  args.tiles = (args.edges[args.bins] + tile - 1) / tile - args.first_tile;
  // Queries and rows of a group stay in the second-level cache while all keys of the item pass.
  args.tiles_per_group = std::min<int64_t>(args.tiles, 16);
  args.call.tiles_per_item = args.tiles_per_group;
  const double work = double(heads) * rows * visible_keys(a) * a.head_dim;
  threads = worth_threads(work, kMultiplyAdds, threads);
  // Queries are packed once an item: long items save that, and every thread should get several.
  constexpr int64_t kLeastKeys = 512, kMostKeys = 4096;
  const int64_t fair = heads * a.key_length / (8 * threads);
  const int64_t keys = std::min(std::max(kLeastKeys, std::min(kMostKeys, fair)), a.key_length);
  args.keys_per_item = (keys + block - 1) / block * block;

  const int64_t mask_rows = args.mask_batch * args.mask_heads;
  std::vector<Columns> columns(size_t(mask_rows * args.tiles));
  args.columns = columns.data();
  for_each_item(mask_rows, int(std::min<int64_t>(threads, mask_rows)), [&](int64_t n, int) {
    for (int64_t i = 0; i < args.tiles; ++i)
      unit.sweeper.place(args, n / args.mask_heads, n % args.mask_heads, i);
  });

  const int64_t parts = (a.key_length + args.keys_per_item - 1) / args.keys_per_item;
  threads = int(std::min<int64_t>(threads, heads * parts));
  const Workspace scratch(unit.sweeper.scratch_bytes(args), threads);
  for_each_item(heads * parts, threads, [&](int64_t n, int thread) {
    // The first keys, which most rows see under a causal mask, first, of all heads.
    const int64_t head = n % heads;
    unit.sweeper.sweep(args, {head / a.heads, head % a.heads, n / heads * args.keys_per_item},
                       scratch.of(thread));
  });
}

void rotate(const RotateArgs& a, int threads) {
  const int64_t rows = a.batch * a.heads * a.length;
  if (rows == 0) return;
  const Unit& unit = *entry_for(a.dtype).unit;
  const double bytes = double(rows) * a.head_dim * (a.dtype == Dtype::float32 ? 8 : 4);
  threads = worth_threads(bytes, kBytesRead, threads);
  const int64_t items = std::min<int64_t>(a.length, threads == 1 ? 1 : 4 * threads);
  for_each_item(a.batch * items, threads, [&](int64_t n, int) {
    const int64_t part = n % items;
    unit.rotate(a, n / items, part * a.length / items, (part + 1) * a.length / items);
  });
}

double peak(const std::string& kind, int threads) {
  Instruction instruction;
  if (kind == "fma")
    instruction = Instruction::fma;
  else if (kind == "dpbf16")
    instruction = Instruction::dpbf16;
  else if (kind == "amx")
    instruction = Instruction::tdpbf16;
  else
    throw std::invalid_argument("peak measures 'fma', 'dpbf16' or 'amx', not '" + kind + "'");
  double (*run)(int64_t) = nullptr;
  for (const Entry& entry : entries)
    if (entry.unit->instruction == instruction && entry.runs()) run = entry.unit->peak;
  if (!run) return std::numeric_limits<double>::quiet_NaN();
  constexpr int64_t kSteps = 1000000;  // some ten milliseconds
  double best = 0;
  for (int repeat = 0; repeat < 5; ++repeat) {
    std::vector<double> operations(threads);
    const auto start = std::chrono::steady_clock::now();
    for_each_item(threads, threads, [&](int64_t item, int) { operations[item] = run(kSteps); });
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - start;
    double sum = 0;
    for (double n : operations) sum += n;
    best = std::max(best, sum / seconds.count() / 1e9);
  }
  return best;
}

}  // namespace multihead
