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
  const Unit *unit, *narrow;  // narrow: for calls whose queries fit one vector
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

bool has_amx() {
  unsigned eax, ebx, ecx, edx;
  if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
  constexpr unsigned kAmxBf16 = 1u << 22, kAmxTile = 1u << 24;
  return edx & kAmxBf16 && edx & kAmxTile;
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
bool runs_avx512_amx() { return runs_avx512_bf16() && has_amx() && may_use_tiles(); }
#else
bool has_amx() { return false; }
#endif

const Entry entries[] = {
    {"baseline", &unit_baseline, &unit_baseline_narrow, always},
#if defined(__x86_64__)
    {"avx2", &unit_avx2, &unit_avx2_narrow, runs_avx2},
    {"avx512", &unit_avx512, &unit_avx512_narrow, runs_avx512},
    {"avx512_bf16", &unit_avx512_bf16, &unit_avx512_bf16_narrow, runs_avx512_bf16},
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

bool serves(const Entry& entry, Dtype dtype) {
  return dtype == Dtype::bfloat16 || entry.unit->instruction == Instruction::fma;
}

int best_for(Dtype dtype) {
  // Processors with AMX run dpbf16ps at half the rate of a float32 FMA: where tiles are refused,
  // bfloat16 that is widened once a block is twice as fast.
  for (int i = kEntries - 1; i > 0; --i) {
    if (entries[i].unit->instruction == Instruction::dpbf16 && has_amx()) continue;
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

// Multiply-adds of the call, from above: masks without a closed form count as dense.
double work_of(const ForwardArgs& a) {
  double keys = static_cast<double>(a.key_length);
  const Mask& mask = a.mask;
  if (mask.has_left && mask.has_right && !mask.left.data && !mask.right.data)
    keys = std::min(keys, double(mask.left.value) + mask.right.value + 1);
  return double(a.batch) * a.heads * a.query_length * keys * (a.head_dim + a.value_dim);
}

// About 100 microseconds of one core: less is not worth waking a thread for.
constexpr double kWorthAThread = 5e6;

// Tiles of an item share the block of K and V that is in the cache, and its copy where one is
// needed; but every thread should get several items. No result depends on it.
int64_t tiles_per_item(const ForwardArgs& a, const Unit& unit, int threads) {
  // V is transposed once an item for tdpbf16ps: more of its small tiles should share that.
  const int64_t most = unit.instruction == Instruction::tdpbf16 ? 32 : 8;
  constexpr double kTileBytes = 512 * 1024;  // queries and outputs of an item, in half the L2
  const int64_t tiles = (a.query_length + unit.tile_rows - 1) / unit.tile_rows;
  const int64_t fair = a.batch * a.heads * tiles / (8 * threads);
  const int64_t fits =
      int64_t(kTileBytes / (double(a.head_dim + a.value_dim) * unit.tile_rows * sizeof(float)));
  return std::max<int64_t>(1, std::min({most, fair, fits, tiles}));
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

std::string instruction_set_for(Dtype dtype) { return entry_for(dtype).name; }

void forward(ForwardArgs args, int threads) {
  const Entry& entry = entry_for(args.dtype);
  const bool narrow = args.query_length <= entry.narrow->tile_rows;
  const Unit& unit = narrow ? *entry.narrow : *entry.unit;
  const double worth = work_of(args) / kWorthAThread;
  if (worth < threads) threads = std::max(1, int(worth));
  args.tiles_per_item = tiles_per_item(args, unit, threads);

  const int64_t rows = args.tiles_per_item * unit.tile_rows;
  const int64_t heads = args.batch * args.heads;
  const int64_t groups = (args.query_length + rows - 1) / rows;
  threads = int(std::min<int64_t>(threads, heads * groups));
  if (threads < 1) return;

  const size_t bytes = (unit.scratch_bytes(args) + 4095) / 4096 * 4096;
  const std::unique_ptr<char, Free> scratch(
      static_cast<char*>(std::aligned_alloc(4096, bytes * threads)));
  if (!scratch) throw std::bad_alloc();

  for_each_item(heads * groups, threads, [&](int64_t item, int thread) {
    // Later queries see more keys under a causal mask: the longest items first, of all heads.
    const int64_t group = groups - 1 - item / heads, head = item % heads;
    unit.forward(args, {head / args.heads, head % args.heads, group * rows},
                 scratch.get() + bytes * thread);
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
