// A grid on the CPU: fibers for its threads, meetings of them, and the memory that they may touch.
#pragma once
#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace emu {

// Switching fibers. ucontext would ask the kernel for the signal mask each time, which takes most of a test.
struct Context {
  void* stack_pointer = nullptr;
};

#if !defined(__x86_64__)
#error "the emulator switches stacks with a few x86-64 instructions; write them for this processor"
#endif
asm(R"(
.text
.type emu_switch, @function
emu_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size emu_switch, .-emu_switch
)");
extern "C" void emu_switch(void** save, void* load) asm("emu_switch");

inline void switch_to(Context& from, Context& to) { emu_switch(&from.stack_pointer, to.stack_pointer); }

// A context that begins in `entry`, which never returns.
inline void prepare(Context& context, char* stack, size_t bytes, void (*entry)()) {
  auto* top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(stack) + bytes) & ~uintptr_t{15});
  *--top = nullptr;  // where a return address would be: keeps the stack aligned as a call does
  *--top = reinterpret_cast<void*>(entry);
  for (int i = 0; i < 6; ++i) *--top = nullptr;
  context.stack_pointer = top;
}

struct Dim {
  unsigned x = 1, y = 1, z = 1;
};

struct Error : std::runtime_error {
  using std::runtime_error::runtime_error;
};

constexpr int kSharedBytes = 232448 - 1024;

// What a CUtensorMap says, to the emulated tensor memory accelerator.
struct Map {
  const uint8_t* base;
  int rank;
  int64_t size[3];          // elements, innermost first
  int64_t stride_bytes[3];  // of dimension 1 and 2 at [1], [2]
  int box[3];
  int element_bytes;
};

constexpr uint64_t kEncoded = 0x6d61705f6f6b2121;
static_assert(sizeof(Map) <= sizeof(CUtensorMap) - sizeof(uint64_t));

inline void write_map(CUtensorMap* map, const Map& told) {
  std::memcpy(map, &told, sizeof told);
  map->opaque[15] = kEncoded;
}

inline Map read_map(const CUtensorMap* map) {
  if (map->opaque[15] != kEncoded) throw Error("a map that was never encoded");
  if (reinterpret_cast<uintptr_t>(map) % 64) throw Error("a map that is not aligned");
  Map told;
  std::memcpy(&told, map, sizeof told);
  return told;
}

constexpr int kSharedBase = 1024;  // the address at which a block's dynamic shared memory begins

// What asynchronous copies and products do, when their time comes.
using Deferred = std::function<void()>;

struct Copy {  // cp.async of one 16-byte unit of shared memory; run is empty once it has been done
  Deferred run;
  int unit;
};

struct BulkStore {  // of shared memory, first read and then written; empty once that has been done
  Deferred read, write;
};

struct Meeting {  // a barrier: everybody of `expected` arrives, then the generation changes
  int arrived = 0;
  uint64_t generation = 0;
  std::vector<uint64_t> values[2];
};

struct Block;

struct Fiber {
  Context context;
  std::unique_ptr<char[]> stack;
  Dim thread, block_index;
  Block* block = nullptr;
  int linear = 0;
  bool done = false;
  std::function<bool()> ready;
  std::string waits_for;
  std::vector<Copy> copies;              // cp.async, not yet in a group
  std::deque<std::vector<Copy>> groups;  // cp.async groups, oldest first
  std::vector<BulkStore> stores;         // cp.async.bulk out of shared memory, not yet in a group
  std::deque<std::vector<BulkStore>> store_groups;
  std::vector<int> unfenced;  // 16-byte units of shared memory that it has written by ordinary means
  uint64_t fenced = 0;        // of its warp's acquires of global memory: those before its last proxy fence
};

struct Wgmma {
  std::vector<Deferred> open;
  std::deque<std::vector<Deferred>> groups;
  struct Call {
    int arrived = 0;
    float* d[128];
    uint64_t a = 0, b = 0;
    int accumulate = 0;
  } call;
};

struct Block {
  Dim index;
  int running = 0;    // threads that have not ended
  bool left = false;  // all have
  bool come = false;  // there has been a multiprocessor for it
  std::vector<uint8_t> shared;
  // For each 16-byte unit of shared memory: all threads that have written it and issued no fence since.
  // Several threads may write one unit, and a fence orders the writes of its own thread only.
  std::vector<std::vector<int>> unfenced_writers;
  std::vector<int> read;  // by 16-byte unit: how many bulk stores have begun and may still read it
  std::map<int, Meeting> barriers;
  std::vector<Meeting> warps;
  std::vector<uint64_t> acquires;  // by warp: of global memory that others may have written
  std::vector<Wgmma> warpgroups;
  std::set<uint64_t*> mbarriers;
};

struct Pending {
  Deferred load;
  uint64_t since;         // the pass in which it began
  uint64_t earliest = 0;  // the first pass in which it may arrive
};

struct Grid {
  unsigned cluster = 1;           // blocks of a cluster
  int64_t shared_bytes = 0;       // dynamic, of a block
  std::vector<Meeting> clusters;  // by cluster, their threads' barrier
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Pending> pending;  // TMA loads on their way
  uint64_t num_boxes = 0;        // number of boxes whose loads have begun
  Fiber* current = nullptr;
  Context scheduler;
  uint64_t passes = 0;  // of the scheduler: the clock
  std::mt19937 random;
  int eagerness = 50;  // percent: how often what may be late happens at once
  Dim grid_dim, block_dim;
  std::function<void()> body;
  std::exception_ptr error;
};

inline Grid* grid = nullptr;

inline Fiber& self() { return *grid->current; }

inline bool chance() { return static_cast<int>(grid->random() % 100) < grid->eagerness; }

inline void yield();

// Now and then somebody else goes first.
inline void maybe_yield() {
  if (grid->random() % 8 == 0) yield();
}

inline void wait_until(std::function<bool()> ready, std::string what) {
  if (ready()) return;
  Fiber& fiber = self();
  fiber.ready = std::move(ready);
  fiber.waits_for = std::move(what);
  switch_to(fiber.context, grid->scheduler);
  if (grid->error) throw Error("stopped");
}

inline void yield() {
  Fiber& fiber = self();
  fiber.ready = [] { return true; };
  fiber.waits_for = "its turn";
  switch_to(fiber.context, grid->scheduler);
  if (grid->error) throw Error("stopped");
}

// ---- memory that kernels may touch

struct Memory {  // registered arrays; where any is registered, global accesses must fall inside one
  struct Range {
    uintptr_t begin, end;
    bool writable;
    std::string name;
  };
  std::vector<Range> ranges;
};

inline Memory memory;

inline void register_array(const std::string& name, const void* p, size_t bytes, bool writable) {
  const auto begin = reinterpret_cast<uintptr_t>(p);
  memory.ranges.push_back({begin, begin + bytes, writable, name});
}

inline void unregister_arrays() { memory.ranges.clear(); }

inline void check_access(const void* p, size_t bytes, bool write) {
  if (memory.ranges.empty()) return;
  const auto at = reinterpret_cast<uintptr_t>(p);
  if (grid != nullptr && grid->current != nullptr) {
    const Block& block = *self().block;
    const auto base = reinterpret_cast<uintptr_t>(block.shared.data());
    if (at >= base && at + bytes <= base + block.shared.size()) return;
  }
  for (const auto& range : memory.ranges)
    if (at >= range.begin && at + bytes <= range.end) {
      if (write && !range.writable) throw Error("write into " + range.name + ", which is read only");
      return;
    }
  throw Error(std::string(write ? "write" : "read") + " of " + std::to_string(bytes) +
              " bytes outside every array");
}

// ---- running

inline void entry() {
  try {
    grid->body();
  } catch (...) {
    if (!grid->error) grid->error = std::current_exception();
  }
  self().done = true;
  self().block->left = --self().block->running == 0;
  switch_to(self().context, grid->scheduler);
}

// Threads that look at memory again and again never stand still: long before this many turns each, all of a
// test's have ended.
inline uint64_t most_passes = 200000;
inline uint64_t last_passes = 0;  // of the last launch that ended well
// The first `late_boxes` boxes of a launch arrive kLate passes or more after their loads have begun.
inline uint64_t late_boxes = 0;
constexpr uint64_t kLate = 1000;
// What the OS thread does between two of them.
inline std::function<void()> between_passes;
// How many blocks there is room for; where it is empty, for all. Blocks come in their order, whole clusters
// at a time, and none leaves before its end.
inline std::function<size_t()> room;
// In its place: whether a block, the first of a cluster, comes now; who does not, does not hold up others.
inline std::function<bool(size_t)> comes;

inline void let_blocks_come(Grid& g) {
  size_t resident = 0;
  for (const auto& block : g.blocks) resident += block->come && !block->left;
  for (size_t first = 0; first < g.blocks.size(); first += g.cluster) {
    if (g.blocks[first]->come) continue;
    if (comes && !comes(first)) continue;
    if (room && resident + g.cluster > room()) return;
    for (size_t i = 0; i < g.cluster; ++i) g.blocks[first + i]->come = true;
    resident += g.cluster;
  }
}

constexpr uint64_t kLatest = 100;  // passes that a load takes at most

inline std::string report(const Grid& g) {
  std::map<std::string, int> waiting;
  for (const auto& fiber : g.fibers)
    if (!fiber->done)
      ++waiting["block " + std::to_string(fiber->block_index.x) + " warp " +
                std::to_string(fiber->linear / 32) + ": " + fiber->waits_for];
  std::string text = "deadlock:";
  for (const auto& [what, count] : waiting) text += "\n  " + std::to_string(count) + " threads of " + what;
  return text;
}

// Runs body() as grid_dim x block_dim threads. Throws Error on a deadlock or on misuse.
inline void launch(unsigned grid_dim, unsigned block_dim, unsigned seed, std::function<void()> body,
                   int eagerness = 50, unsigned cluster = 1, size_t shared_bytes = kSharedBytes,
                   size_t stack_bytes = 96 * 1024) {
  if (grid_dim % cluster) throw Error("a grid that is not of whole clusters");
  Grid g;
  g.cluster = cluster;
  g.shared_bytes = static_cast<int64_t>(shared_bytes);
  g.clusters.resize(grid_dim / cluster);
  g.random.seed(seed);
  g.eagerness = eagerness;
  g.grid_dim = {grid_dim, 1, 1};
  g.block_dim = {block_dim, 1, 1};
  g.body = std::move(body);
  grid = &g;
  for (unsigned b = 0; b < grid_dim; ++b) {
    auto block = std::make_unique<Block>();
    block->index = {b, 0, 0};
    block->running = static_cast<int>(block_dim);
    // 1024-byte alignment of addresses in the block, as kernels get it; poisoned.
    block->shared.resize(kSharedBytes + 2048, 0xFF);
    block->unfenced_writers.resize((kSharedBytes + 2048) / 16 + 1);
    block->read.resize(block->unfenced_writers.size(), 0);
    block->warps.resize((block_dim + 31) / 32);
    block->acquires.resize((block_dim + 31) / 32);
    block->warpgroups.resize((block_dim + 127) / 128);
    for (unsigned t = 0; t < block_dim; ++t) {
      auto fiber = std::make_unique<Fiber>();
      fiber->stack.reset(new char[stack_bytes]);
      fiber->thread = {t, 0, 0};
      fiber->block_index = {b, 0, 0};
      fiber->block = block.get();
      fiber->linear = static_cast<int>(t);
      fiber->ready = [] { return true; };
      prepare(fiber->context, fiber->stack.get(), stack_bytes, entry);
      g.fibers.push_back(std::move(fiber));
    }
    g.blocks.push_back(std::move(block));
  }
  size_t left = g.fibers.size();
  while (left) {
    ++g.passes;
    if (between_passes) between_passes();
    let_blocks_come(g);
    bool moved = static_cast<bool>(comes);  // what else holds the device may move
    const size_t start = g.random() % g.fibers.size();
    for (size_t i = 0; i < g.fibers.size(); ++i) {
      Fiber& fiber = *g.fibers[(start + i) % g.fibers.size()];
      if (fiber.done || !(g.error || (fiber.block->come && fiber.ready()))) continue;
      moved = true;
      g.current = &fiber;
      switch_to(g.scheduler, fiber.context);
      if (fiber.done) --left;
    }
    g.current = nullptr;
    // Loads arrive in any order, and always when nothing else can move; those who only look at memory again
    // and again do move, so also after a while.
    for (size_t i = 0; i < g.pending.size();) {
      if (g.passes < g.pending[i].earliest) {
        moved = true;
        ++i;
        continue;
      }
      if (moved && g.passes - g.pending[i].since < kLatest && !chance()) {
        ++i;
        continue;
      }
      Deferred load = std::move(g.pending[i].load);
      g.pending.erase(g.pending.begin() + static_cast<long>(i));
      try {
        load();
      } catch (...) {
        if (!g.error) g.error = std::current_exception();
      }
      moved = true;
    }
    if (!moved && !g.error) g.error = std::make_exception_ptr(Error(report(g)));
    if (g.passes == most_passes && !g.error)
      g.error = std::make_exception_ptr(Error("no end in sight, " + report(g)));
  }
  grid = nullptr;
  last_passes = g.passes;
  if (g.error) std::rethrow_exception(g.error);
  for (const auto& fiber : g.fibers)
    if (!fiber->copies.empty() || !fiber->groups.empty() || !fiber->stores.empty() ||
        !fiber->store_groups.empty())
      throw Error("cp.async never waited for");
  for (const auto& block : g.blocks)
    for (const auto& group : block->warpgroups)
      if (!group.open.empty() || !group.groups.empty()) throw Error("wgmma never waited for");
}

inline void meet(Meeting& meeting, int expected, const std::string& what) {
  const uint64_t generation = meeting.generation;
  if (++meeting.arrived > expected) throw Error("too many threads at " + what);
  if (meeting.arrived == expected) {
    meeting.arrived = 0;
    ++meeting.generation;
    return;
  }
  wait_until([&meeting, generation] { return meeting.generation != generation; }, what);
}

// Every lane of the warp gives a value and sees all 32.
inline const std::vector<uint64_t>& exchange(uint64_t value) {
  Fiber& fiber = self();
  Meeting& warp = fiber.block->warps[fiber.linear / 32];
  auto& values = warp.values[warp.generation & 1];
  values.resize(32);
  values[fiber.linear % 32] = value;
  meet(warp, 32, "a warp's exchange");
  return values;
}

template <class T>
uint64_t bits_of(T value) {
  static_assert(sizeof(T) <= 8);
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof(T));
  return bits;
}

template <class T>
T of_bits(uint64_t bits) {
  T value;
  std::memcpy(&value, &bits, sizeof(T));
  return value;
}

inline uint8_t* shared_base(Block& block) {
  const auto raw = reinterpret_cast<uintptr_t>(block.shared.data());
  return reinterpret_cast<uint8_t*>((raw + 1023) & ~uintptr_t{1023});
}

inline uint32_t address_of(Block& block, const void* p) {
  const auto offset = static_cast<const uint8_t*>(p) - shared_base(block);
  if (offset < 0 || offset >= grid->shared_bytes) throw Error("an address outside shared memory");
  return static_cast<uint32_t>(offset) + kSharedBase;
}

inline uint8_t* at_address(Block& block, uint32_t address) {
  if (address < kSharedBase || address >= kSharedBase + kSharedBytes) throw Error("a bad shared address");
  return shared_base(block) + (address - kSharedBase);
}

// Returns the number of the 16-byte unit of shared memory that a thread is about to write.
inline int unit_to_write(Fiber& fiber, const void* p) {
  const int unit = static_cast<int>(address_of(*fiber.block, p) / 16);
  if (fiber.block->read[unit]) throw Error("a write to what a bulk store may still read");
  return unit;
}

// Adds a thread to a unit's unfenced writers. Returns false if it was among them.
inline bool add_writer(Fiber& fiber, int unit) {
  std::vector<int>& writers = fiber.block->unfenced_writers[unit];
  if (std::find(writers.begin(), writers.end(), fiber.linear) != writers.end()) return false;
  writers.push_back(fiber.linear);
  return true;
}

// An ordinary write of the current thread. What it writes of its block's shared memory needs a fence before
// the asynchronous proxy reads it.
inline void mark_written(const void* p, size_t bytes) {
  Fiber& fiber = self();
  auto* const first = static_cast<uint8_t*>(const_cast<void*>(p));
  const auto offset = first - shared_base(*fiber.block);
  if (offset < 0 || offset >= grid->shared_bytes) return;
  for (size_t i = 0; i < (offset % 16 + bytes + 15) / 16; ++i) {
    const int unit = unit_to_write(fiber, first + i * 16);
    if (add_writer(fiber, unit)) fiber.unfenced.push_back(unit);
  }
}

inline void mark_clean(Block& block, void* p, int bytes) {
  const int unit = static_cast<int>(address_of(block, p) / 16);
  for (int i = 0; i < bytes / 16; ++i) block.unfenced_writers[unit + i].clear();
}

}  // namespace emu

// No macros: the runtime's structures have fields of these names.
#define EMU_INDEX(NAME, VALUE)                                                   \
  inline const struct {                                                          \
    struct {                                                                     \
      __attribute__((always_inline)) operator unsigned() const { return VALUE; } \
    } x;                                                                         \
  } NAME = {}
EMU_INDEX(threadIdx, emu::self().thread.x);
EMU_INDEX(blockIdx, emu::self().block_index.x);
EMU_INDEX(blockDim, emu::grid->block_dim.x);
EMU_INDEX(gridDim, emu::grid->grid_dim.x);
#undef EMU_INDEX
