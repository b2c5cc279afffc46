// Stores a warp's rows of a tile by the tensor memory accelerator. The warp does not wait for memory: it goes
// on to its next products while the accelerator stores.
//
// A box of 16 rows x 64 columns of a result passes through 2 KiB of shared memory, a swizzled box of 16 lines
// (box.h):
//
//   all lanes   wait until no earlier store reads this shared memory, and write their fragments (stmatrix)
//   all lanes   fence: their writes come before the accelerator's reads
//   all lanes   synchronize (sync_warp)
//   lane 0      starts the store, and ends its group of stores
//
// The fence is needed because the accelerator is another way to memory (the asynchronous proxy in PTX), which
// is not ordered after a thread's own writes. Lane 0 starts all stores of a warp, so only this lane can wait
// for the stores: until they have read shared memory (bulk_wait_read), or until they are done (bulk_wait).
//
// A warp has two boxes of shared memory and writes them in turn. Before it writes a box, it waits until at
// most the latest store still reads shared memory. The latest store reads the other box. This is so even for
// the first store of a tile, which always takes box 0, because the tile before ended in one of two ways:
//
//   - with a store of box 1: a tile has an even number of stores
//   - with rows that pass through registers, which wait until no store reads shared memory
//
// The accelerator stores whole boxes. It leaves out columns that the result does not have, because a tensor
// map says how many columns there are. It knows no experts, so it would also write rows of the next expert.
// Two kinds of rows therefore pass through registers, as in exchange.cuh:
//
//   - rows of an expert that do not fill a box: fewer than 16, at its end
//   - rows that are stored at places (Problem::place)
//
// A tensor map demands a base and strides that are multiples of 16 bytes. This is so for all results of
// grouped products: they can also be stored through registers in words of 16 bytes, so their numbers of
// columns and their strides are multiples of 8 elements.
#pragma once
#include "exchange.cuh"

namespace pmoe {

constexpr int kBoxesOfWarp = 2;
constexpr int kBoxRows = 16;

// The tensor maps of a product's results, with boxes of 16 rows x 64 columns. A map of a result that is not
// stored is never read.
struct StoreMaps {
  TensorMap d;       // Problem::d; for a T_M of two halves (SwiGLU), only the first half, gate
  TensorMap up;      // the second half of T_M
  TensorMap active;  // Problem::active
};

#if PMOE_HOPPER_CODE

// The two boxes of shared memory of one warp, for one tile.
//
// The base class converts the rows that pass through registers. It does so in the first box.
class Boxes : public Exchange<true> {
 public:
  static constexpr bool kStoresBoxes = true;

  // maps: the tensor maps of the results.
  // buffer: kBoxesOfWarp boxes of shared memory that only this warp uses.
  __device__ __forceinline__ Boxes(const StoreMaps& maps, void* buffer, int lane)
      : Exchange<true>(buffer, lane), maps_(maps) {}

  __device__ __forceinline__ const StoreMaps& maps() const { return maps_; }

  __device__ __forceinline__ void to_rows(const uint32_t (&word)[16], Words (&rows)[4]) const {
    wait_read<0>();
    Exchange<true>::to_rows(word, rows);  // begins with sync_warp()
  }

  // Starts to store 64 columns of the 16 rows.
  //
  // word: this lane's fragments.
  // column, row: the first column and row of the box in the result.
  __device__ __forceinline__ void store(const uint32_t (&word)[16], const TensorMap& map, int column,
                                        int row) const {
    const int offset = box_ * kExchangeBytes;
    wait_read<kBoxesOfWarp - 1>();
    sync_warp();  // no lane writes before lane 0 has waited
    write_matrices(word, offset);
    fence_proxy_async();
    sync_warp();  // lane 0 starts the store after all lanes have written
    if (lane() != 0) return;
    tma_store_2d(&map, buffer() + offset, column, row);
    bulk_commit();
  }

  // Chooses the other box for the next store. It is called after each 64 columns, stored as a box or through
  // registers, so that the compiler knows at each store which box it takes.
  __device__ __forceinline__ void take_other_box() { box_ = (box_ + 1) % kBoxesOfWarp; }

  // Waits until all stores of the calling warp are done. A warp calls it before it ends, because its boxes
  // are gone when its block has ended. Only lane 0 has begun stores, so only lane 0 can wait for them.
  __device__ __forceinline__ static void wait_for_stores() {
    if (thread_again() % 32 == 0) bulk_wait<0>();
  }

 private:
  // Waits until at most kLeft of the warp's latest stores still read their boxes.
  template <int kLeft>
  __device__ __forceinline__ void wait_read() const {
    if (lane() == 0) bulk_wait_read<kLeft>();
  }

  const StoreMaps& maps_;
  int box_ = 0;  // which of the warp's boxes the next store takes
};

#endif  // PMOE_HOPPER_CODE

}  // namespace pmoe
