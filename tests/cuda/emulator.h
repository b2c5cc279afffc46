// Runs a kernel's own source on the CPU: every CUDA thread is a fiber of one OS thread, all blocks of a grid
// are resident, and what a GPU does asynchronously happens at a moment drawn from a seed, the latest that the
// program allows included. Same names as cuda/common/device_ptx.cuh.
//
// What it finds: wrong results, deadlocks (reported with what every thread waits for), shared memory used
// before it arrived or written while still in use, barriers with the wrong number of arrivals, reads through
// a missing fence of the asynchronous proxy, and accesses outside registered arrays (`Memory`). What it does
// not model: time, weak ordering of ordinary memory accesses, bank conflicts, register pressure.
#pragma once
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

#include "common/host_device.h"
#include "common/scalar.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __restrict__
#define __launch_bounds__(...)
#define __grid_constant__

#define PMOE_EMULATOR 1
#define PMOE_HOPPER_CODE 1

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
constexpr int kSharedBase = 1024;  // the address at which a block's dynamic shared memory begins

// What asynchronous copies and products do, when their time comes.
using Deferred = std::function<void()>;

struct Copy {  // cp.async of one 16-byte unit of shared memory; run is empty once it has been done
  Deferred run;
  int unit;
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
  std::vector<uint8_t> shared;
  std::vector<int> dirty;  // by 16-byte unit: 1 + the thread that wrote it without a fence, 0 for clean
  std::map<int, Meeting> barriers;
  std::vector<Meeting> warps;
  std::vector<uint64_t> acquires;  // by warp: of global memory that others may have written
  std::vector<Wgmma> warpgroups;
  std::set<uint64_t*> mbarriers;
};

struct Pending {
  Deferred load;
  uint64_t since;  // which pass
};

struct Grid {
  unsigned cluster = 1;           // blocks of a cluster
  std::vector<Meeting> clusters;  // by cluster, their threads' barrier
  std::vector<std::unique_ptr<Block>> blocks;
  std::vector<std::unique_ptr<Fiber>> fibers;
  std::vector<Pending> pending;  // TMA loads on their way
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

inline void forget_arrays() { memory.ranges.clear(); }

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
// What the OS thread does between two of them.
inline std::function<void()> between_passes;
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
                   int eagerness = 50, unsigned cluster = 1, size_t stack_bytes = 96 * 1024) {
  if (grid_dim % cluster) throw Error("a grid that is not of whole clusters");
  Grid g;
  g.cluster = cluster;
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
    block->dirty.resize((kSharedBytes + 2048) / 16 + 1, 0);
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
    bool moved = false;
    const size_t start = g.random() % g.fibers.size();
    for (size_t i = 0; i < g.fibers.size(); ++i) {
      Fiber& fiber = *g.fibers[(start + i) % g.fibers.size()];
      if (fiber.done || !(g.error || fiber.ready())) continue;
      moved = true;
      g.current = &fiber;
      switch_to(g.scheduler, fiber.context);
      if (fiber.done) --left;
    }
    g.current = nullptr;
    // Loads arrive in any order, and always when nothing else can move; those who only look at memory again
    // and again do move, so also after a while.
    for (size_t i = 0; i < g.pending.size();) {
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
  if (g.error) std::rethrow_exception(g.error);
  for (const auto& fiber : g.fibers)
    if (!fiber->copies.empty() || !fiber->groups.empty()) throw Error("cp.async never waited for");
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
  if (offset < 0 || offset >= kSharedBytes) throw Error("an address outside shared memory");
  return static_cast<uint32_t>(offset) + kSharedBase;
}

inline uint8_t* at_address(Block& block, uint32_t address) {
  if (address < kSharedBase || address >= kSharedBase + kSharedBytes) throw Error("a bad shared address");
  return shared_base(block) + (address - kSharedBase);
}

inline int mark_dirty(Fiber& fiber, void* p) {
  const int unit = static_cast<int>(address_of(*fiber.block, p) / 16);
  fiber.block->dirty[unit] = 1 + fiber.linear;
  return unit;
}

inline void mark_clean(Block& block, void* p, int bytes) {
  const int unit = static_cast<int>(address_of(block, p) / 16);
  for (int i = 0; i < bytes / 16; ++i) block.dirty[unit + i] = 0;
}

}  // namespace emu

#define threadIdx (emu::self().thread)
#define blockIdx (emu::self().block_index)
#define blockDim (emu::grid->block_dim)
#define gridDim (emu::grid->grid_dim)

namespace pmoe {

// ---- threads

inline uint8_t* shared_memory() { return emu::shared_base(*emu::self().block); }

inline int thread_again() { return static_cast<int>(threadIdx.x); }

template <class T>
T shfl_xor(T value, int mask) {
  const int lane = emu::self().linear % 32;
  return emu::of_bits<T>(emu::exchange(emu::bits_of(value))[lane ^ mask]);
}

template <class T>
T shfl(T value, int lane) {
  return emu::of_bits<T>(emu::exchange(emu::bits_of(value))[lane & 31]);
}

template <class T>
T shfl_up(T value, int distance) {
  const int lane = emu::self().linear % 32;
  const T found =
      emu::of_bits<T>(emu::exchange(emu::bits_of(value))[lane < distance ? lane : lane - distance]);
  return found;
}

inline uint32_t ballot(bool holds) {
  const auto& values = emu::exchange(holds);
  uint32_t mask = 0;
  for (int i = 0; i < 32; ++i) mask |= uint32_t{values[i] != 0} << i;
  return mask;
}

inline void sync_warp() { emu::exchange(0); }

inline void sync_block() {
  emu::meet(emu::self().block->barriers[0], static_cast<int>(blockDim.x), "the block's barrier");
}

inline void sync_named(int id, int threads) {
  emu::meet(emu::self().block->barriers[id], threads, "named barrier " + std::to_string(id));
}

inline void forget(int64_t&) {}
inline void forget(int&) {}

// ---- memory

template <class V>
V read(const V* p) {
  emu::check_access(p, sizeof(V), false);
  return *p;
}

template <class V>
void write(V* p, V value) {
  emu::check_access(p, sizeof(V), true);
  *p = value;
}

inline Words load16(const void* p) {
  if (reinterpret_cast<uintptr_t>(p) % 16) throw emu::Error("a 16-byte load that is not aligned");
  emu::check_access(p, 16, false);
  Words v;
  std::memcpy(&v, p, 16);
  return v;
}

inline void store16(void* p, const Words& v) {
  if (reinterpret_cast<uintptr_t>(p) % 16) throw emu::Error("a 16-byte store that is not aligned");
  emu::check_access(p, 16, true);
  std::memcpy(p, &v, 16);
}

inline void prefetch_l2(const void* p) { emu::check_access(p, 1, false); }

inline void store16_shared(void* p, const Words& v) {
  store16(p, v);
  emu::self().unfenced.push_back(emu::mark_dirty(emu::self(), p));
}

inline void cp_async16(void* dst, const void* src, bool valid) {
  emu::Fiber& fiber = emu::self();
  if (reinterpret_cast<uintptr_t>(dst) % 16) throw emu::Error("cp.async to an address that is not aligned");
  if (valid && reinterpret_cast<uintptr_t>(src) % 16)
    throw emu::Error("cp.async from an address that is not aligned");
  if (valid) emu::check_access(src, 16, false);
  const int unit = emu::mark_dirty(fiber, dst);
  std::memset(dst, 0xFF, 16);
  emu::Deferred copy = [dst, src, valid] {
    if (valid)
      std::memcpy(dst, src, 16);
    else
      std::memset(dst, 0, 16);
  };
  if (emu::chance()) {
    copy();
    copy = nullptr;
  }
  fiber.copies.push_back({std::move(copy), unit});
}

inline void cp_async_commit() {
  emu::Fiber& fiber = emu::self();
  fiber.groups.push_back(std::move(fiber.copies));
  fiber.copies.clear();
}

template <int kLeft>
void cp_async_wait() {
  emu::Fiber& fiber = emu::self();
  while (static_cast<int>(fiber.groups.size()) > kLeft) {
    for (auto& copy : fiber.groups.front()) {
      if (copy.run) copy.run();
      fiber.unfenced.push_back(copy.unit);
    }
    fiber.groups.pop_front();
  }
}

// ---- across blocks

inline uint32_t load_acquire(const uint32_t* p) {
  emu::check_access(p, 4, false);
  return *p;
}

inline uint32_t add_acq_rel(uint32_t* p, uint32_t value) {
  emu::check_access(p, 4, true);
  const uint32_t before = *p;
  *p += value;
  return before;
}

// The same, and what follows may be written by others: bulk reads of it need a fence.
inline uint32_t load_acquire_system(const uint32_t* p) {
  ++emu::self().block->acquires[emu::self().linear / 32];
  return load_acquire(p);
}

inline void store_release_system(uint32_t* p, uint32_t value) { write(p, value); }

inline void fence_proxy_async_global() {
  emu::Fiber& fiber = emu::self();
  fiber.fenced = fiber.block->acquires[fiber.linear / 32];
}

// Every thread has had its turn between two of these.
inline uint64_t nanoseconds() { return 100 * emu::grid->passes; }

inline void pause() { emu::yield(); }

[[noreturn]] inline void fail() { throw emu::Error("the kernel gave up"); }

template <class T>
T atomicAdd(T* p, T value) {
  emu::check_access(p, sizeof(T), true);
  const T before = *p;
  *p = before + value;
  return before;
}

// ---- matrix instructions of sm_80

inline void load_matrices(uint32_t (&r)[4], const void* row, bool transpose) {
  if (reinterpret_cast<uintptr_t>(row) % 16) throw emu::Error("ldmatrix from an address that is not aligned");
  emu::address_of(*emu::self().block, row);
  const auto rows = emu::exchange(emu::bits_of(row));
  const int lane = emu::self().linear % 32;
  for (int m = 0; m < 4; ++m) {
    uint16_t pair[2];
    for (int i = 0; i < 2; ++i) {
      const int line = transpose ? lane % 4 * 2 + i : lane / 4;
      const int column = transpose ? lane / 4 : lane % 4 * 2 + i;
      std::memcpy(&pair[i], emu::of_bits<const uint8_t*>(rows[m * 8 + line]) + 2 * column, 2);
    }
    r[m] = uint32_t{pair[0]} | uint32_t{pair[1]} << 16;
  }
  sync_warp();
}

inline void ldmatrix_x4(uint32_t (&r)[4], const void* row) { load_matrices(r, row, false); }

inline void ldmatrix_x4_trans(uint32_t (&r)[4], const void* row) { load_matrices(r, row, true); }

inline void stmatrix_x4(void* row, const uint32_t (&r)[4]) {
  if (reinterpret_cast<uintptr_t>(row) % 16) throw emu::Error("stmatrix to an address that is not aligned");
  emu::address_of(*emu::self().block, row);
  const auto rows = emu::exchange(emu::bits_of(row));
  const int lane = emu::self().linear % 32;
  for (int m = 0; m < 4; ++m)
    std::memcpy(emu::of_bits<uint8_t*>(rows[m * 8 + lane / 4]) + lane % 4 * 4, &r[m], 4);
}

template <class T>
void mma_m16n8k16(float* d, const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  const int lane = emu::self().linear % 32;
  // a0: rows 0-7, k 0-7; a1: rows 8-15; a2: k 8-15; a3: both. b0: k 0-7, b1: k 8-15.
  uint64_t words[3] = {uint64_t{a[0]} | uint64_t{a[1]} << 32, uint64_t{a[2]} | uint64_t{a[3]} << 32,
                       uint64_t{b0} | uint64_t{b1} << 32};
  std::vector<uint64_t> all[3];
  for (int i = 0; i < 3; ++i) all[i] = emu::exchange(words[i]);
  for (int c = 0; c < 4; ++c) {
    const int row = lane / 4 + (c / 2) * 8, column = lane % 4 * 2 + c % 2;
    float sum = d[c];
    for (int k = 0; k < 16; ++k) {
      const int of_a = (row % 8) * 4 + (k % 8) / 2, of_b = column * 4 + (k % 8) / 2;
      const uint32_t word_a = static_cast<uint32_t>(all[k / 8][of_a] >> (row / 8 * 32));
      const uint32_t word_b = static_cast<uint32_t>(all[2][of_b] >> (k / 8 * 32));
      const float x = k % 2 ? high_half<T>(word_a) : low_half<T>(word_a);
      const float y = k % 2 ? high_half<T>(word_b) : low_half<T>(word_b);
      sum += x * y;
    }
    d[c] = sum;
  }
}

// ---- barriers that count bytes

struct MbarrierState {
  uint16_t expected;
  uint16_t pending;
  int32_t bytes_and_phase;  // bytes outstanding * 2 + phase
};
static_assert(sizeof(MbarrierState) == 8);

inline MbarrierState& state_of(uint64_t* bar) { return *reinterpret_cast<MbarrierState*>(bar); }

inline void check_mbarrier(emu::Block& block, uint64_t* bar) {
  if (!block.mbarriers.count(bar)) throw emu::Error("an mbarrier that was never initialised");
}

inline void settle(MbarrierState& s) {
  if (s.pending == 0 && s.bytes_and_phase >> 1 == 0) {
    s.pending = s.expected;
    s.bytes_and_phase ^= 1;
  }
}

inline void mbarrier_init(uint64_t* bar, int arrivals) {
  emu::self().block->mbarriers.insert(bar);
  state_of(bar) = {static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
}

inline void fence_mbarrier_init() {}

inline void mbarrier_arrive(uint64_t* bar) {
  check_mbarrier(*emu::self().block, bar);
  MbarrierState& s = state_of(bar);
  if (s.pending == 0) throw emu::Error("more arrivals than an mbarrier expects");
  --s.pending;
  settle(s);
  emu::maybe_yield();
}

inline void mbarrier_arrive_expect(uint64_t* bar, int bytes) {
  check_mbarrier(*emu::self().block, bar);
  state_of(bar).bytes_and_phase += 2 * bytes;
  mbarrier_arrive(bar);
}

inline void mbarrier_complete(uint64_t* bar, int bytes) {
  state_of(bar).bytes_and_phase -= 2 * bytes;
  settle(state_of(bar));
}

inline void mbarrier_wait(uint64_t* bar, uint32_t parity) {
  check_mbarrier(*emu::self().block, bar);
  // try_wait with a parity: true once the phase of that parity has completed.
  emu::wait_until(
      [bar, parity] { return static_cast<uint32_t>(state_of(bar).bytes_and_phase & 1) != parity; },
      "an mbarrier at " + std::to_string(emu::address_of(*emu::self().block, bar)));
}

// Copies that have not been waited for are not behind it.
inline void fence_proxy_async() {
  emu::Fiber& fiber = emu::self();
  for (int unit : fiber.unfenced)
    if (fiber.block->dirty[unit] == 1 + fiber.linear) fiber.block->dirty[unit] = 0;
  fiber.unfenced.clear();
}

// ---- the tensor memory accelerator: boxes of a tensor into rows of 128 bytes, swizzled

struct TensorMap {
  const uint8_t* base;
  int rank;
  int64_t size[3];          // elements, innermost first
  int64_t stride_bytes[3];  // of dimension 1 and 2 at [1], [2]
  int box[3];
  int element_bytes;
};

inline void fill_box(const TensorMap& m, uint8_t* out, int x, int y, int z) {
  for (int k = 0; k < m.box[2]; ++k)
    for (int j = 0; j < m.box[1]; ++j)
      for (int i = 0; i < m.box[0]; ++i) {
        const int64_t gx = x + i, gy = y + j, gz = z + k;
        const bool inside = gx >= 0 && gx < m.size[0] && gy >= 0 && gy < m.size[1] &&
                            (m.rank < 3 || (gz >= 0 && gz < m.size[2]));
        uint32_t offset = static_cast<uint32_t>((k * m.box[1] + j) * 128 + i * m.element_bytes);
        offset ^= ((offset >> 7) & 7) << 4;
        if (inside) {
          const uint8_t* from = m.base + gx * m.element_bytes + gy * m.stride_bytes[1] +
                                (m.rank < 3 ? 0 : gz * m.stride_bytes[2]);
          std::memcpy(out + offset, from, m.element_bytes);
        } else {
          std::memset(out + offset, 0, m.element_bytes);
        }
      }
}

inline emu::Block& block_of_cluster(uint32_t rank) {
  const unsigned first = emu::self().block_index.x / emu::grid->cluster * emu::grid->cluster;
  if (rank >= emu::grid->cluster) throw emu::Error("a rank outside the cluster");
  return *emu::grid->blocks[first + rank];
}

// The same place in another block's shared memory.
template <class P>
P* there(emu::Block& block, P* here) {
  const auto offset = reinterpret_cast<uint8_t*>(here) - emu::shared_base(*emu::self().block);
  return reinterpret_cast<P*>(emu::shared_base(block) + offset);
}

inline uint32_t cluster_rank() { return emu::self().block_index.x % emu::grid->cluster; }

inline void sync_cluster() {
  emu::meet(emu::grid->clusters[emu::self().block_index.x / emu::grid->cluster],
            static_cast<int>(emu::grid->cluster * blockDim.x), "the cluster's barrier");
}

inline void mbarrier_arrive_at(uint64_t* bar, uint32_t rank) {
  emu::Block& block = block_of_cluster(rank);
  if (block.left) throw emu::Error("an arrival at a block that has left");
  uint64_t* remote = there(block, bar);
  check_mbarrier(block, remote);
  MbarrierState& s = state_of(remote);
  if (s.pending == 0) throw emu::Error("more arrivals than an mbarrier expects");
  --s.pending;
  settle(s);
  emu::maybe_yield();
}

inline void tma_load_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z, uint16_t ranks) {
  if (emu::address_of(*emu::self().block, dst) % 1024)
    throw emu::Error("a swizzled box must begin on 1024 bytes");
  if (emu::self().fenced != emu::self().block->acquires[emu::self().linear / 32])
    throw emu::Error("a bulk read behind an acquire without a fence of the asynchronous proxy");
  const TensorMap m = *map;
  if (m.box[0] * m.element_bytes != 128) throw emu::Error("a 128-byte swizzle needs rows of 128 bytes");
  const int bytes = m.box[1] * m.box[2] * 128;
  for (uint32_t rank = 0; rank < emu::grid->cluster; ++rank) {
    if (!(ranks >> rank & 1)) continue;
    emu::Block& block = block_of_cluster(rank);
    if (block.left) throw emu::Error("a load into a block that has left");
    auto* out = static_cast<uint8_t*>(there(block, static_cast<uint8_t*>(dst)));
    uint64_t* remote = there(block, bar);
    check_mbarrier(block, remote);
    // Whatever was there is gone as soon as the load is issued.
    std::memset(out, 0xFF, static_cast<size_t>(bytes));
    emu::mark_clean(block, out, bytes);
    const auto load = [=, &block] {
      if (block.left) throw emu::Error("a load arrives in a block that has left");
      fill_box(m, out, x, y, z);
      mbarrier_complete(remote, bytes);
    };
    emu::grid->pending.push_back({load, emu::grid->passes});
  }
}

inline void tma_load(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z) {
  tma_load_to(dst, map, bar, x, y, z, static_cast<uint16_t>(1u << cluster_rank()));
}

inline void tma_prefetch(const TensorMap*) {}

inline void tma_load_2d(void* dst, const TensorMap* map, uint64_t* bar, int x, int y) {
  if (map->rank != 2) throw emu::Error("tma_load_2d of a map that is not of rank 2");
  tma_load(dst, map, bar, x, y, 0);
}

inline void tma_load_3d(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z) {
  if (map->rank != 3) throw emu::Error("tma_load_3d of a map that is not of rank 3");
  tma_load(dst, map, bar, x, y, z);
}

inline void tma_load_2d_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, uint16_t ranks) {
  if (map->rank != 2) throw emu::Error("tma_load_2d_to of a map that is not of rank 2");
  tma_load_to(dst, map, bar, x, y, 0, ranks);
}

inline void tma_load_3d_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z,
                           uint16_t ranks) {
  if (map->rank != 3) throw emu::Error("tma_load_3d_to of a map that is not of rank 3");
  tma_load_to(dst, map, bar, x, y, z, ranks);
}

// ---- warpgroup products

template <int kRegisters>
void fewer_registers() {}
template <int kRegisters>
void more_registers() {}

inline uint32_t shared_address(const void* p) { return emu::address_of(*emu::self().block, p); }

inline void wgmma_fence() { sync_warp(); }

template <int kCount>
void pin_accumulators(float (&)[kCount]) {}

// One 16-bit element of an operand: line along M or N, k along the reduction (PTX ISA, matrix descriptors,
// 128-byte swizzle; K-major, or MN-major where transposed).
inline uint16_t operand_element(emu::Block& block, uint64_t descriptor, bool transposed, int line, int k) {
  const uint32_t start = static_cast<uint32_t>(descriptor & 0x3FFF) << 4;
  const uint32_t leading = static_cast<uint32_t>((descriptor >> 16) & 0x3FFF) << 4;
  const uint32_t stride = static_cast<uint32_t>((descriptor >> 32) & 0x3FFF) << 4;
  uint32_t address = start;
  if (transposed)
    address += line / 64 * leading + k / 8 * stride + k % 8 * 128 + line % 64 * 2;
  else
    address += line / 8 * stride + line % 8 * 128 + k * 2;
  address ^= ((address >> 7) & 7) << 4;
  if (block.dirty[address / 16])
    throw emu::Error("wgmma reads what thread " + std::to_string(block.dirty[address / 16] - 1) +
                     " wrote without a proxy fence");
  uint16_t bits;
  std::memcpy(&bits, emu::at_address(block, address), 2);
  return bits;
}

template <class T, bool kTransposeA, bool kTransposeB>
void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  emu::Fiber& fiber = emu::self();
  emu::Wgmma& group = fiber.block->warpgroups[fiber.linear / 128];
  for (uint64_t descriptor : {a, b}) {
    if (descriptor >> 62 != 1) throw emu::Error("a descriptor without the 128-byte swizzle");
    if ((descriptor >> 49) & 7) throw emu::Error("a descriptor with a base offset");
  }
  auto& call = group.call;
  if (call.arrived && (call.a != a || call.b != b || call.accumulate != accumulate))
    throw emu::Error("threads of a warpgroup disagree about a wgmma");
  call.a = a, call.b = b, call.accumulate = accumulate;
  call.d[fiber.linear % 128] = d;
  emu::Meeting& meeting = fiber.block->barriers[3000 + fiber.linear / 128];
  if (++call.arrived < 128) {
    emu::meet(meeting, 128, "wgmma");
    return;
  }
  auto* block = fiber.block;
  const auto whole = call;
  call = {};
  emu::Deferred product = [block, whole] {
    std::vector<float> of_a(64 * 16), of_b(256 * 16);
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < 64; ++i)
        of_a[i * 16 + k] = widen<T>(T{operand_element(*block, whole.a, kTransposeA, i, k)});
      for (int j = 0; j < 256; ++j)
        of_b[j * 16 + k] = widen<T>(T{operand_element(*block, whole.b, kTransposeB, j, k)});
    }
    for (int t = 0; t < 128; ++t)
      for (int i = 0; i < 128; ++i) {
        const int row = t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + t % 4 * 2 + i % 2;
        float sum = whole.accumulate ? whole.d[t][i] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += of_a[row * 16 + k] * of_b[column * 16 + k];
        whole.d[t][i] = sum;
      }
  };
  group.open.push_back(std::move(product));
  emu::meet(meeting, 128, "wgmma");
}

inline void wgmma_commit() {
  // All 128 threads say it; the last one counts.
  emu::Fiber& fiber = emu::self();
  emu::Block& block = *fiber.block;
  emu::Wgmma& group = block.warpgroups[fiber.linear / 128];
  emu::Meeting& meeting = block.barriers[1000 + fiber.linear / 128];
  if (meeting.arrived == 127) {
    group.groups.push_back(std::move(group.open));
    group.open.clear();
    if (emu::chance()) {  // at once, with all that came before
      for (auto& each : group.groups)
        for (auto& product : each) product();
      for (auto& each : group.groups) each.clear();
    }
  }
  emu::meet(meeting, 128, "wgmma.commit_group");
}

template <int kLeft>
void wgmma_wait() {
  emu::maybe_yield();
  emu::Fiber& fiber = emu::self();
  emu::Block& block = *fiber.block;
  emu::Wgmma& group = block.warpgroups[fiber.linear / 128];
  emu::Meeting& meeting = block.barriers[2000 + fiber.linear / 128];
  if (meeting.arrived == 127)
    while (static_cast<int>(group.groups.size()) > kLeft) {
      for (auto& product : group.groups.front()) product();
      group.groups.pop_front();
    }
  emu::meet(meeting, 128, "wgmma.wait_group");
}

}  // namespace pmoe
