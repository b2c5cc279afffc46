// Launching the grouped products, without a word of PyTorch: pointers, sizes, a stream.
#pragma once
#include <cuda.h>

#include <cstdint>
#include <string>

#include "problem.h"

namespace pmoe {

enum class Element : int { kBf16, kFp16 };

struct GroupedGemm {
  Element element;
  Form form;
  Epilogue epilogue;
  Activation activation;  // kNone where the epilogue is plain
  int cluster = 1;        // blocks that share B; Hopper's own
};

// What the two blocks of a cluster have in common: none are formed; B, of tiles one below the other; or A, of
// tiles side by side.
enum class Sharing : int { kByRule, kNothing, kB, kA };

// The two ways to compute one. function(): for cudaFuncGetAttributes. A launch is the current device's, and
// throws std::runtime_error where CUDA refuses it.
struct GroupedGemmPath {
  const char* name;
  const void* (*function)(const GroupedGemm&);
  // a_rows, b_rows: of what A and B (where it has N rows) point to.
  void (*launch)(const GroupedGemm&, const Problem&, int64_t a_rows, int64_t b_rows, int blocks,
                 void* stream);
  int threads, shared_bytes;
};

extern const GroupedGemmPath hopper_path, ampere_path;

// As users and errors read it.
std::string name_of(const GroupedGemm&, const GroupedGemmPath&);

// The maps by which Hopper's path loads the operands. a_rows, b_rows: as above. Throws as a launch does.
void encode_maps(Element, Form, const Problem&, int64_t a_rows, int64_t b_rows, CUtensorMap* a_map,
                 CUtensorMap* b_map);

// Of a pair that ends in its first half the other half is computed for nothing: at most an eighth of the
// tiles may be so, as much as is saved. Tiles one below the other need groups of many rows, 1024 on average;
// tiles side by side need an even number of tiles, or many, in a row of the result, and an A that is not
// gathered. A shared B saves more.
inline bool goes_in_pairs(int tiles) { return tiles % 2 == 0 || tiles >= 7; }

inline Sharing best_sharing(Form form, const Problem& p, int tiles_across) {
  const int rows = form == Form::kWeight ? p.m : p.rows / larger(p.experts, 1);
  if (rows >= 1024) return Sharing::kB;
  return !p.a_gathered && goes_in_pairs(tiles_across) ? Sharing::kA : Sharing::kNothing;
}

// All that there are of a path.
template <class Visit>
void for_each_grouped_gemm(int cluster, Visit visit) {
  for (Element element : {Element::kBf16, Element::kFp16}) {
    for (Form form : {Form::kForward, Form::kInput, Form::kWeight})
      visit(GroupedGemm{element, form, Epilogue::kPlain, Activation::kNone, cluster});
    for (Activation activation :
         {Activation::kRelu, Activation::kGelu, Activation::kSilu, Activation::kSwiglu}) {
      visit(GroupedGemm{element, Form::kForward, Epilogue::kHidden, activation, cluster});
      visit(GroupedGemm{element, Form::kInput, Epilogue::kHiddenGradient, activation, cluster});
    }
  }
}

}  // namespace pmoe
