// A gate whose choice is exact in any order, by plain loops: what the protocol's processors do.
#pragma once
#include "common/device.cuh"
#include "flashdmoe_world.h"
#include "peers/protocol.h"

namespace whole_numbers {

using namespace world;

// Scores are quarters: weights and sums are whole numbers.
inline float weight_of(float score) { return 1 + score * 4; }

// What follows from a rank's scores.
inline void expect_choice(Routing& g, int experts) {
  g.wanted.l_aux = 0;
  for (size_t i = 0; i < g.weight.size() - 1; ++i) {
    const size_t score = i / static_cast<size_t>(g.choices) * static_cast<size_t>(experts);
    g.weight[i] = weight_of(g.logits[score + static_cast<size_t>(g.chosen[i])]);
  }
  for (size_t i = 0; i < g.logits.size() - 1; ++i)
    g.wanted.l_aux += 4 * g.logits[i] * static_cast<float>(g.wanted.totals[i % static_cast<size_t>(experts)]);
}

inline bool has_choice(const Routing& g) {
  bool has = g.scored.totals == g.wanted.totals && g.scored.l_aux == g.wanted.l_aux;
  for (size_t i = 0; i < g.weight.size() - 1; ++i) has &= g.scored.weight[i] == g.weight[i];
  return has;
}

// The launch is to make the scores, too: it copies them, a tile at a time, two of them across.
inline void ask_for_scores(Routing& g, Pass& pass) {
  g.given = g.logits;
  std::fill(g.logits.begin(), g.logits.end(), NAN);
  pass.routing.choice.weight = g.given.data();
  pass.routing.products[0] = ceil_div(g.tokens, pass.layout.tile_rows), pass.routing.products[1] = 2;
}

inline void score_tile(const Pass& pass, const Task& task) {
  const GateChoice& choice = pass.routing.choice;
  const int experts = pass.layout.cells(), first = task.tile * pass.layout.tile_rows;
  peers::test_delay(pass.watch, static_cast<uint32_t>(7500 + task.tile));
  for (int token = first; token < first + pass.rows_of(pass.tokens, task.tile); ++token)
    for (int i = token * experts; i < (token + 1) * experts; ++i)
      if (i % 2 == task.column) write(choice.logits + i, read(static_cast<const float*>(choice.weight) + i));
}

// A group's experts from its scores, by plain loops.
inline void choose_group(const Pass& pass, int group, int begin, int end) {
  const GateChoice& choice = pass.routing.choice;
  const int experts = pass.layout.cells();
  std::vector<float> sum(static_cast<size_t>(experts));
  for (int token = begin; token < end; ++token) {
    const float* const score = choice.logits + token * experts;
    std::vector<bool> is_taken(static_cast<size_t>(experts));
    for (int e = 0; e < experts; ++e) sum[static_cast<size_t>(e)] += read(score + e) * 4;
    for (int k = 0; k < pass.choices; ++k) {
      int best = -1;
      for (int e = 0; e < experts; ++e)
        if (!is_taken[static_cast<size_t>(e)] && (best < 0 || read(score + e) > read(score + best))) best = e;
      is_taken[static_cast<size_t>(best)] = true;
      write(pass.expert + token * pass.choices + k, best);
      write(pass.weight + token * pass.choices + k, weight_of(read(score + best)));
    }
  }
  for (int e = 0; e < experts; ++e)
    write(choice.probability + group * experts + e, sum[static_cast<size_t>(e)]);
}

// Behind all groups' choices.
inline void write_loss(const Pass& pass, const std::vector<int32_t>& total) {
  const GateChoice& choice = pass.routing.choice;
  const int experts = pass.layout.cells();
  float loss = 0;
  for (int e = 0; e < experts; ++e) {
    const int32_t rows = total[static_cast<size_t>(e)];
    write(choice.counts + e, rows);
    for (int group = 0; group < pass.routing.groups; ++group)
      loss += static_cast<float>(rows) * read(choice.probability + group * experts + e);
  }
  write(choice.l_aux, loss);
}

}  // namespace whole_numbers
