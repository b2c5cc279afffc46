// What Hopper adds, in the emulator: barriers that count bytes, tensor boxes, warpgroup products.
// emulator.h includes this file.
#pragma once
#include "emulator_grid.h"

namespace pmoe {

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

// It orders what this thread has written, and nothing that other threads have written to the same 16 bytes.
// It does not order copies for which the thread has not waited, also if the thread wrote the same 16 bytes
// before by ordinary means.
inline void fence_proxy_async() {
  emu::Fiber& fiber = emu::self();
  for (int unit : fiber.unfenced) {
    std::vector<int>& writers = fiber.block->unfenced_writers[unit];
    writers.erase(std::remove(writers.begin(), writers.end(), fiber.linear), writers.end());
  }
  fiber.unfenced.clear();
  for (const emu::Copy& copy : fiber.copies) emu::add_writer(fiber, copy.unit);
  for (const auto& group : fiber.groups)
    for (const emu::Copy& copy : group) emu::add_writer(fiber, copy.unit);
}

// ---- the tensor memory accelerator: boxes of a tensor into rows of 128 bytes, swizzled

using TensorMap = CUtensorMap;

inline void fill_box(const emu::Map& m, uint8_t* out, int x, int y, int z) {
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

// The rank above the address; the block's own has neither.
inline uint32_t cluster_address(const void* p, uint32_t rank) {
  block_of_cluster(rank);
  return (rank + 1) << 24 | emu::address_of(*emu::self().block, p);
}

inline void mbarrier_arrive_remote(uint32_t bar) {
  emu::Block& block = block_of_cluster((bar >> 24) - 1);
  if (block.left) throw emu::Error("an arrival at a block that has left");
  auto* const remote = reinterpret_cast<uint64_t*>(emu::at_address(block, bar & 0xFFFFFF));
  check_mbarrier(block, remote);
  MbarrierState& s = state_of(remote);
  if (s.pending == 0) throw emu::Error("more arrivals than an mbarrier expects");
  --s.pending;
  settle(s);
  emu::maybe_yield();
}

inline void mbarrier_arrive_at(uint64_t* bar, uint32_t rank) {
  mbarrier_arrive_remote(cluster_address(bar, rank));
}

inline void store_async(Words* place, const Words& v, uint64_t* bar, uint32_t rank) {
  if (reinterpret_cast<uintptr_t>(place) % 16) throw emu::Error("st.async to an address that is not aligned");
  emu::Block& block = block_of_cluster(rank);
  if (block.left) throw emu::Error("a word to a block that has left");
  Words* remote = there(block, place);
  uint64_t* signal = there(block, bar);
  check_mbarrier(block, signal);
  const auto store = [=, &block] {
    if (block.left) throw emu::Error("a word arrives in a block that has left");
    *remote = v;
    mbarrier_complete(signal, 16);
  };
  emu::grid->pending.push_back({store, emu::grid->passes});
}

inline void tma_load_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z, uint16_t ranks) {
  if (emu::address_of(*emu::self().block, dst) % 1024)
    throw emu::Error("a swizzled box must begin on 1024 bytes");
  if (emu::self().fenced != emu::self().block->acquires[emu::self().linear / 32])
    throw emu::Error("a bulk read behind an acquire without a fence of the asynchronous proxy");
  const emu::Map m = emu::read_map(map);
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
    // What it reads may be what is there now, and arrive late.
    const auto early = std::make_shared<std::vector<uint8_t>>(emu::chance() ? bytes : 0);
    if (!early->empty()) fill_box(m, early->data(), x, y, z);
    const bool is_late = emu::grid->num_boxes++ < emu::late_boxes;
    const auto load = [=, &block] {
      if (block.left) throw emu::Error("a load arrives in a block that has left");
      if (early->empty())
        fill_box(m, out, x, y, z);
      else
        std::memcpy(out, early->data(), early->size());
      mbarrier_complete(remote, bytes);
    };
    const uint64_t now = emu::grid->passes;
    emu::grid->pending.push_back({load, now, is_late ? now + emu::kLate : 0});
  }
}

inline void tma_load(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z) {
  tma_load_to(dst, map, bar, x, y, z, static_cast<uint16_t>(1u << cluster_rank()));
}

inline void tma_prefetch(const TensorMap*) {}

inline void tma_load_2d(void* dst, const TensorMap* map, uint64_t* bar, int x, int y) {
  if (emu::read_map(map).rank != 2) throw emu::Error("tma_load_2d of a map that is not of rank 2");
  tma_load(dst, map, bar, x, y, 0);
}

inline void tma_load_3d(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z) {
  if (emu::read_map(map).rank != 3) throw emu::Error("tma_load_3d of a map that is not of rank 3");
  tma_load(dst, map, bar, x, y, z);
}

inline void tma_load_2d_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, uint16_t ranks) {
  if (emu::read_map(map).rank != 2) throw emu::Error("tma_load_2d_to of a map that is not of rank 2");
  tma_load_to(dst, map, bar, x, y, 0, ranks);
}

inline void tma_load_3d_to(void* dst, const TensorMap* map, uint64_t* bar, int x, int y, int z,
                           uint16_t ranks) {
  if (emu::read_map(map).rank != 3) throw emu::Error("tma_load_3d_to of a map that is not of rank 3");
  tma_load_to(dst, map, bar, x, y, z, ranks);
}

// ---- bulk copies

inline void check_bulk(const void* shared, const void* global, int bytes, bool write) {
  if (bytes <= 0 || bytes % 16) throw emu::Error("a bulk copy that is not of 16 bytes");
  if (reinterpret_cast<uintptr_t>(shared) % 16 || reinterpret_cast<uintptr_t>(global) % 16)
    throw emu::Error("a bulk copy of an address that is not aligned");
  emu::address_of(*emu::self().block, static_cast<const uint8_t*>(shared) + bytes - 1);
  emu::check_access(global, static_cast<size_t>(bytes), write);
}

inline void bulk_load(void* dst, const void* src, uint64_t* bar, int bytes) {
  check_bulk(dst, src, bytes, false);
  check_mbarrier(*emu::self().block, bar);
  std::memset(dst, 0xFF, static_cast<size_t>(bytes));
  emu::mark_clean(*emu::self().block, dst, bytes);
  const auto load = [=] {
    std::memcpy(dst, src, static_cast<size_t>(bytes));
    mbarrier_complete(bar, bytes);
  };
  emu::grid->pending.push_back({load, emu::grid->passes});
}

// Begins a store of `bytes` bytes of shared memory. They are read now, or when the thread waits for that.
//
// write: gets the bytes when the thread waits until they are written.
inline void begin_store(const void* src, int bytes, std::function<void(const uint8_t*)> write) {
  emu::Fiber& fiber = emu::self();
  emu::Block& block = *fiber.block;
  if (fiber.fenced != block.acquires[fiber.linear / 32])
    throw emu::Error("a bulk write behind an acquire without a fence of the asynchronous proxy");
  const int first = static_cast<int>(emu::address_of(block, src) / 16), end = first + bytes / 16;
  for (int unit = first; unit < end; ++unit) {
    if (!block.unfenced_writers[unit].empty())
      throw emu::Error("a bulk copy of what thread " + std::to_string(block.unfenced_writers[unit].front()) +
                       " wrote without a proxy fence");
    ++block.read[unit];
  }
  const auto held = std::make_shared<std::vector<uint8_t>>();
  const auto* const from = static_cast<const uint8_t*>(src);
  emu::Deferred read = [=, &block] {
    held->assign(from, from + bytes);
    for (int unit = first; unit < end; ++unit) --block.read[unit];
  };
  if (emu::chance()) std::exchange(read, nullptr)();
  fiber.stores.push_back({read, [=] { write(held->data()); }});
}

inline void bulk_store(void* dst, const void* src, int bytes) {
  check_bulk(src, dst, bytes, true);
  begin_store(src, bytes, [=](const uint8_t* from) { std::memcpy(dst, from, static_cast<size_t>(bytes)); });
}

// Calls each(element of memory, offset in shared memory) for the elements of a box that the tensor has.
template <class Each>
void each_of_box(const emu::Map& m, int x, int y, const Each& each) {
  for (int j = 0; j < m.box[1]; ++j)
    for (int i = 0; i < m.box[0]; ++i) {
      const int64_t gx = x + i, gy = y + j;
      if (gx < 0 || gx >= m.size[0] || gy < 0 || gy >= m.size[1]) continue;
      uint32_t offset = static_cast<uint32_t>(j * 128 + i * m.element_bytes);
      offset ^= ((offset >> 7) & 7) << 4;
      each(const_cast<uint8_t*>(m.base) + gx * m.element_bytes + gy * m.stride_bytes[1], offset);
    }
}

inline void tma_store_2d(const TensorMap* map, const void* src, int x, int y) {
  const emu::Map m = emu::read_map(map);
  if (m.rank != 2) throw emu::Error("tma_store_2d of a map that is not of rank 2");
  if (emu::address_of(*emu::self().block, src) % 1024)
    throw emu::Error("a swizzled box must begin on 1024 bytes");
  if (m.box[0] * m.element_bytes != 128) throw emu::Error("a 128-byte swizzle needs rows of 128 bytes");
  const int64_t first = larger<int64_t>(x, 0), end = smaller<int64_t>(x + m.box[0], m.size[0]);
  for (int64_t row = larger<int64_t>(y, 0); row < smaller<int64_t>(y + m.box[1], m.size[1]); ++row)
    if (first < end)
      emu::check_access(m.base + first * m.element_bytes + row * m.stride_bytes[1],
                        static_cast<size_t>((end - first) * m.element_bytes), true);
  begin_store(src, m.box[1] * 128, [=](const uint8_t* from) {
    each_of_box(m, x, y, [&](uint8_t* to, uint32_t offset) {
      std::memcpy(to, from + offset, static_cast<size_t>(m.element_bytes));
    });
  });
}

inline void bulk_commit() {
  emu::Fiber& fiber = emu::self();
  fiber.store_groups.push_back(std::move(fiber.stores));
  fiber.stores.clear();
}

inline void read_stores(std::vector<emu::BulkStore>& group) {
  for (auto& store : group)
    if (store.read) std::exchange(store.read, nullptr)();
}

template <int kLeft>
void bulk_wait_read() {
  auto& groups = emu::self().store_groups;
  for (size_t i = 0; i + size_t{kLeft} < groups.size(); ++i) read_stores(groups[i]);
}

template <int kLeft>
void bulk_wait() {
  emu::maybe_yield();
  auto& groups = emu::self().store_groups;
  while (groups.size() > size_t{kLeft}) {
    read_stores(groups.front());
    for (auto& store : groups.front()) store.write();
    groups.pop_front();
  }
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
  if (const auto& writers = block.unfenced_writers[address / 16]; !writers.empty())
    throw emu::Error("wgmma reads what thread " + std::to_string(writers.front()) +
                     " wrote without a proxy fence");
  uint16_t bits;
  std::memcpy(&bits, emu::at_address(block, address), 2);
  return bits;
}

// Where accumulator i of a warpgroup's thread lies in the result.
inline int accumulator_row(int thread, int i) { return thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8; }
inline int accumulator_column(int thread, int i) { return i / 4 * 8 + thread % 4 * 2 + i % 2; }

template <class T, bool kTransposeA, bool kTransposeB, int kColumns>
void wgmma_k16(float (&d)[kColumns / 2], uint64_t a, uint64_t b, int accumulate) {
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
    std::vector<float> of_a(64 * 16), of_b(kColumns * 16);
    for (int k = 0; k < 16; ++k) {
      for (int i = 0; i < 64; ++i)
        of_a[i * 16 + k] = widen<T>(T{operand_element(*block, whole.a, kTransposeA, i, k)});
      for (int j = 0; j < kColumns; ++j)
        of_b[j * 16 + k] = widen<T>(T{operand_element(*block, whole.b, kTransposeB, j, k)});
    }
    for (int t = 0; t < 128; ++t)
      for (int i = 0; i < kColumns / 2; ++i) {
        const int row = accumulator_row(t, i), column = accumulator_column(t, i);
        float sum = whole.accumulate ? whole.d[t][i] : 0.0f;
        for (int k = 0; k < 16; ++k) sum += of_a[row * 16 + k] * of_b[column * 16 + k];
        whole.d[t][i] = sum;
      }
  };
  group.open.push_back(std::move(product));
  emu::meet(meeting, 128, "wgmma");
}

template <class T, bool kTransposeA, bool kTransposeB>
void wgmma_m64n256k16(float (&d)[128], uint64_t a, uint64_t b, int accumulate) {
  wgmma_k16<T, kTransposeA, kTransposeB, 256>(d, a, b, accumulate);
}

template <class T, bool kTransposeA, bool kTransposeB>
void wgmma_m64n128k16(float (&d)[64], uint64_t a, uint64_t b, int accumulate) {
  wgmma_k16<T, kTransposeA, kTransposeB, 128>(d, a, b, accumulate);
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
