// The routing kernels' own source, every thread of it on the CPU (emulator.h), against plain loops in double.
//
// g++ -std=c++17 -O2 -Icuda -Itests/cuda tests/cuda/route_test.cpp && ./a.out
#include <algorithm>
#include <cstdio>
#include <limits>
#include <numeric>
#include <tuple>

#include "emulator.h"
#include "route/backward.cuh"
#include "route/halves.cuh"
#include "route/kernel.cuh"

using namespace pmoe::route;

namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::mt19937 generator(1);

int draw(int low, int high) {
  return low + static_cast<int>(generator() % static_cast<unsigned>(high - low + 1));
}

float normal() { return std::normal_distribution<float>(0.0f, 2.0f)(generator); }

void expect(bool holds, const std::string& what) {
  if (!holds) throw std::runtime_error(what);
}

bool close(double got, double expected, double scale = 1.0, double tolerance = 2e-5) {
  if (std::isnan(expected)) return std::isnan(got);
  if (std::abs(expected) > FLT_MAX) return got == std::copysign(kInfinity, expected);
  return std::abs(got - expected) <= tolerance * std::max(scale, std::abs(expected));
}

// An array between two guards, poisoned.
template <class T>
class Array {
 public:
  explicit Array(size_t size) : size_(size), all_(size + 2 * kGuard) { poison(); }
  T* get() { return all_.data() + kGuard; }
  const T& operator[](size_t i) const { return all_[kGuard + i]; }
  T& operator[](size_t i) { return all_[kGuard + i]; }
  size_t size() const { return size_; }

  void poison() { std::memset(all_.data(), 0xAB, all_.size() * sizeof(T)); }

  bool guarded() const {
    const auto* bytes = reinterpret_cast<const uint8_t*>(all_.data());
    const size_t edge = kGuard * sizeof(T), inner = size_ * sizeof(T);
    for (size_t i = 0; i < edge; ++i)
      if (bytes[i] != 0xAB || bytes[edge + inner + i] != 0xAB) return false;
    return true;
  }

  bool operator==(const Array& other) const {
    return std::memcmp(&all_[kGuard], &other.all_[kGuard], size_ * sizeof(T)) == 0;
  }

 private:
  static constexpr size_t kGuard = 32;
  size_t size_;
  std::vector<T> all_;
};

enum class Values { kDistinct, kTied, kStrange };

struct Case {
  int tokens, experts, top_k, chunks, chunk_blocks;
  bool normalize, whole_words;
  float z_weight;
  Values values;
  int sorted_chunks = 1, first_last = 0, num_last = 0;

  int slots() const { return tokens * top_k; }
  Sizes sizes() const {
    return {tokens, experts, top_k, chunks, chunk_blocks, sorted_chunks, first_last, num_last};
  }
  bool is_last(int expert) const { return expert >= first_last && expert < first_last + num_last; }
  Rows rows() const { return {tokens, experts, whole_words}; }
  float balance() const {
    const double t = std::max(tokens, 1);
    return static_cast<float>(experts / (t * t * top_k));
  }
  float z_scale() const { return z_weight / static_cast<float>(std::max(tokens, 1)); }
  std::string told() const {
    return "T=" + std::to_string(tokens) + " E=" + std::to_string(experts) + " K=" + std::to_string(top_k) +
           " n=" + std::to_string(chunks) + " B=" + std::to_string(chunk_blocks) +
           " normalize=" + std::to_string(normalize) + " values=" + std::to_string(static_cast<int>(values)) +
           " words=" + std::to_string(whole_words) + " sorted=" + std::to_string(sorted_chunks) +
           " last=" + std::to_string(first_last) + "+" + std::to_string(num_last);
  }
};

float draw_logit(Values values) {
  static const float strange[] = {kNaN,  kInfinity, -kInfinity, -FLT_MAX, FLT_MAX,
                                  -0.0f, 0.0f,      1e-42f,     -1e-42f};
  if (values == Values::kDistinct) return normal();
  if (values == Values::kTied || draw(0, 2)) return static_cast<float>(draw(-1, 1));
  return strange[draw(0, 8)];
}

// This rank's messages are for this many ranks: the largest of 1 to 4 that divides the experts.
int ranks_of(const Case& c) {
  int ranks = 4;
  while (c.experts % ranks) --ranks;
  return ranks;
}

pmoe::counts::Message message_of(const Case& c) { return {ranks_of(c), c.chunks, c.experts / ranks_of(c)}; }

constexpr int kNotFinite = 77;

struct Found {
  Array<float> weight, l_aux;
  Array<int32_t> expert, position, slot, counts, ends, sent;
  Array<int64_t> fault;

  explicit Found(const Case& c)
      : weight(c.slots()),
        l_aux(1),
        expert(c.slots()),
        position(c.slots()),
        slot(c.slots()),
        counts(c.chunks * c.experts),
        ends(c.chunks * c.experts),
        sent(ranks_of(c) * message_of(c).words()),
        fault(1) {}

  bool guarded() const {
    return weight.guarded() && l_aux.guarded() && expert.guarded() && position.guarded() && slot.guarded() &&
           counts.guarded() && ends.guarded() && sent.guarded() && fault.guarded();
  }
  bool operator==(const Found& o) const {
    return weight == o.weight && l_aux == o.l_aux && expert == o.expert && position == o.position &&
           slot == o.slot && counts == o.counts && ends == o.ends && sent == o.sent && fault == o.fault;
  }
};

// ---- plain loops

std::vector<double> softmax_of(const float* row, int experts) {
  double most = -kInfinity, sum = 0;
  for (int e = 0; e < experts; ++e) most = std::max(most, std::isnan(row[e]) ? most : double{row[e]});
  std::vector<double> p(experts);
  for (int e = 0; e < experts; ++e) sum += p[e] = std::exp(row[e] - most);
  for (double& each : p) each /= sum;
  return p;
}

double log_sum(const float* row, int experts) {
  double most = -kInfinity, sum = 0;
  for (int e = 0; e < experts; ++e) most = std::max(most, double{row[e]});
  for (int e = 0; e < experts; ++e) sum += std::exp(row[e] - most);
  return most + std::log(sum);
}

std::vector<int> largest(const float* row, int experts, int top_k) {
  const auto value = [row](int e) { return std::max(row[e], -FLT_MAX); };
  std::vector<int> order(experts);
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) {
    if (std::isnan(row[i]) || std::isnan(row[j])) return std::isnan(row[i]) && !std::isnan(row[j]);
    return value(i) > value(j);
  });
  order.resize(top_k);
  return order;
}

int chunk_of(const Case& c, int token) {
  int chunk = 0;
  while ((chunk + 1) * c.tokens / c.chunks <= token) ++chunk;
  return chunk;
}

void check_choices(const Case& c, const float* logits, const Found& found) {
  for (int t = 0; t < c.tokens; ++t) {
    const float* row = logits + t * c.experts;
    const std::vector<int> expert = largest(row, c.experts, c.top_k);
    const std::vector<double> p = softmax_of(row, c.experts);
    double total = 0;
    for (int e : expert) total += p[e];
    for (int k = 0; k < c.top_k; ++k) {
      expect(found.expert[t * c.top_k + k] == expert[k], "expert of token " + std::to_string(t));
      const double weight = p[expert[k]] / (c.normalize ? total : 1.0);
      expect(close(found.weight[t * c.top_k + k], weight, 0.0, 3e-6) || weight < 1e-35,
             "weight of token " + std::to_string(t));
    }
  }
}

void check_places(const Case& c, const Found& found) {
  std::vector<int> order(c.slots()), counts(c.chunks * c.experts);
  std::iota(order.begin(), order.end(), 0);
  const auto key = [&](int slot) { return chunk_of(c, slot / c.top_k) * c.experts + found.expert[slot]; };
  const auto place = [&](int slot) {
    const int expert = found.expert[slot];
    return std::make_tuple(chunk_of(c, slot / c.top_k) / c.sorted_chunks, c.is_last(expert), expert);
  };
  std::stable_sort(order.begin(), order.end(), [&](int i, int j) { return place(i) < place(j); });
  for (int i = 0; i < c.slots(); ++i) {
    ++counts[key(i)];
    expect(found.slot[i] == order[i], "slot of row " + std::to_string(i));
    expect(found.position[order[i]] == i, "position of slot " + std::to_string(order[i]));
  }
  int end = 0;
  for (int i = 0; i < c.chunks * c.experts; ++i) {
    expect(found.counts[i] == counts[i], "counts");
    expect(found.ends[i] == (end += counts[i]), "ends");
  }
}

std::vector<int> loads(const Case& c, const Found& found) {
  std::vector<int> load(c.experts);
  for (int i = 0; i < c.slots(); ++i) ++load[found.expert[i]];
  return load;
}

void check_loss(const Case& c, const float* logits, const Found& found) {
  const std::vector<int> load = loads(c, found);
  double balance = 0, z = 0;
  for (int t = 0; t < c.tokens; ++t) {
    const std::vector<double> p = softmax_of(logits + t * c.experts, c.experts);
    for (int e = 0; e < c.experts; ++e) balance += p[e] * load[e];
    const double each = log_sum(logits + t * c.experts, c.experts);
    z += each * each;
  }
  const double tokens = std::max(c.tokens, 1);
  double expected = balance * c.experts / (tokens * tokens * c.top_k);
  if (c.z_weight != 0) expected += c.z_weight * z / tokens;
  expect(close(found.l_aux[0], expected),
         "l_aux " + std::to_string(found.l_aux[0]) + " != " + std::to_string(expected));
}

// The fault, and the messages that repeat it behind the other numbers of the header.
void check_messages(const Case& c, const Array<float>& logits, const Found& found) {
  bool is_finite = true;
  for (size_t i = 0; i < logits.size(); ++i) is_finite &= static_cast<bool>(std::isfinite(logits[i]));
  expect(found.fault[0] == (is_finite ? 0 : kNotFinite), "fault");
  const auto message = message_of(c);
  for (int rank = 0; rank < message.ranks; ++rank) {
    const int32_t* const sent = &found.sent[rank * message.words()];
    const int32_t header[] = {11, static_cast<int32_t>(found.fault[0]), 33, 44};
    for (int i = 0; i < 4; ++i) expect(sent[i] == header[i], "header of a message");
    for (int chunk = 0; chunk < c.chunks; ++chunk)
      for (int e = 0; e < message.experts; ++e)
        expect(sent[4 + chunk * message.experts + e] ==
                   found.counts[chunk * c.experts + rank * message.experts + e],
               "counts of a message");
  }
}

// ---- forward

std::vector<uint8_t> workspace(1 << 18, 0xAB);  // of any content

// After a block's last use of shared memory: nothing lies behind what the launch asks for.
void expect_shared(int words) {
  pmoe::sync_block();
  if (threadIdx.x) return;
  const uint8_t* const end = pmoe::shared_memory() + 4 * words;
  for (int i = 0; i < 1024; ++i) expect(end[i] == 0xFF, "a write behind shared memory");
}

template <class S>
Found run_forward(const Case& c, Array<float>& logits, unsigned seed) {
  Found found(c);
  const Sizes sizes = c.sizes();
  expect(Workspace::bytes(sizes.blocks(), c.experts) <= static_cast<int64_t>(workspace.size()), "workspace");
  const Forward a{sizes,
                  c.rows(),
                  logits.get(),
                  c.normalize,
                  c.balance(),
                  c.z_scale(),
                  found.weight.get(),
                  found.expert.get(),
                  found.position.get(),
                  found.slot.get(),
                  found.counts.get(),
                  found.ends.get(),
                  found.l_aux.get(),
                  Workspace::at(workspace.data(), sizes.blocks(), c.experts),
                  found.fault.get(),
                  kNotFinite,
                  {message_of(c), {11, 22, 33, 44}, found.fault.get(), found.counts.get(), found.sent.get()}};
  expect(4 * ForwardShared<S>::words(c.experts, c.top_k) <= emu::kSharedBytes, "shared memory");
  const auto launch = [&](void (*kernel)(Forward), int blocks) {
    emu::launch(static_cast<unsigned>(blocks), S::kThreads, seed, [&] {
      kernel(a);
      expect_shared(ForwardShared<S>::words(c.experts, c.top_k));
    });
  };
  launch(choose_kernel<S>, sizes.blocks());
  launch(place_kernel<S>, sizes.blocks() + 1);
  expect(found.guarded(), "a write outside an array");
  return found;
}

// ---- backward

struct Gradients {
  bool has_weight, has_partials, has_loss;
  int tiles;
};

void check_gradient(const Case& c, const float* logits, const Found& found,
                    const std::vector<double>& grad_weight, double grad_loss, const Array<float>& got) {
  const std::vector<int> load = loads(c, found);
  for (int t = 0; t < c.tokens; ++t) {
    const float* row = logits + t * c.experts;
    const std::vector<double> p = softmax_of(row, c.experts);
    std::vector<double> dp(c.experts);
    double chosen = 0, inner = 0, dot = 0, most = 1e-3;
    for (int k = 0; k < c.top_k; ++k) chosen += p[found.expert[t * c.top_k + k]];
    for (int k = 0; k < c.top_k; ++k)
      inner += grad_weight[t * c.top_k + k] * p[found.expert[t * c.top_k + k]] / chosen;
    for (int k = 0; k < c.top_k; ++k) {
      const double g = grad_weight[t * c.top_k + k];
      most = std::max(most, std::abs(g));
      dp[found.expert[t * c.top_k + k]] += c.normalize ? (g - inner) / chosen : g;
    }
    for (int e = 0; e < c.experts; ++e) {
      dp[e] += grad_loss * c.balance() * load[e];
      dot += p[e] * dp[e];
      most = std::max(most, std::abs(dp[e]));
    }
    const double z = c.z_weight == 0 ? 0 : grad_loss * c.z_scale() * 2 * log_sum(row, c.experts);
    if (std::abs(z) > 1e30) continue;  // overflows in float32
    most = std::max(most, std::abs(z));
    for (int e = 0; e < c.experts; ++e)
      expect(close(got[t * c.experts + e], p[e] * (dp[e] - dot + z), most, 1e-5),
             "gradient of token " + std::to_string(t));
  }
}

template <class S>
Array<float> run_backward(const Case& c, Array<float>& logits, Found& found, const Gradients& given,
                          const float* weight, const float* partial, const float* loss, unsigned blocks) {
  Array<float> got(c.tokens * c.experts);
  const Backward a{c.rows(),
                   c.top_k,
                   c.chunks,
                   logits.get(),
                   found.expert.get(),
                   found.weight.get(),
                   found.counts.get(),
                   c.normalize,
                   c.balance(),
                   c.z_scale(),
                   given.has_weight ? weight : nullptr,
                   given.has_partials ? partial : nullptr,
                   found.position.get(),
                   given.tiles,
                   given.has_loss ? loss : nullptr,
                   got.get()};
  emu::launch(blocks, S::kThreads, generator(), [&] {
    backward_kernel<S>(a);
    expect_shared(backward_words<S>(c.top_k));
  });
  expect(got.guarded(), "a write outside the gradient");
  return got;
}

template <class S>
void check_backward(const Case& c, Array<float>& logits, Found& found) {
  const int source = draw(0, 2);
  const Gradients given{source == 1, source == 2, draw(0, 3) > 0, draw(1, 4)};
  std::vector<float> weight(c.slots()), partial(given.tiles * c.slots());
  std::vector<double> expected(c.slots());
  for (float& each : weight) each = normal();
  for (float& each : partial) each = normal();
  const float loss = normal();
  for (int i = 0; i < c.slots(); ++i) {
    if (given.has_weight) expected[i] = weight[i];
    if (given.has_partials)
      for (int p = 0; p < given.tiles; ++p) expected[i] += partial[p * c.slots() + found.position[i]];
  }
  const unsigned blocks = static_cast<unsigned>(draw(1, 3));
  const auto got = run_backward<S>(c, logits, found, given, weight.data(), partial.data(), &loss, blocks);
  check_gradient(c, logits.get(), found, expected, given.has_loss ? loss : 0.0, got);
  const auto again =
      run_backward<S>(c, logits, found, given, weight.data(), partial.data(), &loss, blocks + 1);
  expect(got == again, "the gradient depends on the grid");
}

// ---- the operands of the gate's products

// Two bfloat16 numbers for each gradient, and the weight twice; also of values that are no numbers.
void check_halves(int tokens, int experts, int columns, unsigned blocks) {
  Array<float> grad(tokens * experts);
  Array<pmoe::bf16> halves(2 * grad.size()), weight(experts * columns), twice(2 * weight.size());
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = draw_logit(i % 3 ? Values::kDistinct : Values::kStrange);
  for (size_t i = 0; i < weight.size(); ++i) weight[i] = pmoe::narrow<pmoe::bf16>(normal());
  const Halves a{experts,
                 static_cast<uint32_t>(grad.size()),
                 static_cast<uint32_t>(weight.size() / 8),
                 grad.get(),
                 halves.get(),
                 reinterpret_cast<const uint8_t*>(weight.get()),
                 reinterpret_cast<uint8_t*>(twice.get())};
  emu::launch(blocks, kHalvesThreads, generator(), [&] { halves_kernel(a); });
  const auto same = [](pmoe::bf16 x, pmoe::bf16 y) { return x.bits == y.bits; };
  for (int t = 0; t < tokens; ++t)
    for (int e = 0; e < experts; ++e) {
      const float x = grad[t * experts + e];
      const pmoe::bf16 upper = pmoe::narrow<pmoe::bf16>(x), *const row = &halves[t * 2 * experts];
      expect(same(row[e], upper), "upper half of token " + std::to_string(t));
      expect(same(row[experts + e], pmoe::narrow<pmoe::bf16>(x - pmoe::Scalar<pmoe::bf16>::widen(upper))),
             "lower half");
    }
  for (size_t i = 0; i < twice.size(); ++i)
    expect(same(twice[i], weight[i % weight.size()]), "the weight, twice");
  expect(halves.guarded() && twice.guarded(), "halves: a write outside an array");
}

// ---- beside other kernels

// A foreign kernel leaves room for one block, or two: for a while, or for ever.
template <class S>
void check_late_blocks(const Case& c, Array<float>& logits, const Found& found) {
  const size_t few = static_cast<size_t>(draw(1, 2));
  const uint64_t goes = draw(0, 1) ? 20 : ~uint64_t{0};
  emu::room = [=] { return emu::grid->passes < goes ? few : size_t{1000}; };
  expect(run_forward<S>(c, logits, generator()) == found, "blocks that come late change the result");
  emu::room = nullptr;
}

// Blocks that wait for all others, as a barrier of the whole grid has them do: found where they come late.
void check_that_waits_are_found() {
  uint32_t arrived = 0;
  emu::room = [] { return size_t{1}; };
  emu::most_passes = 1000;
  std::string told;
  try {
    emu::launch(2, 32, 1, [&] {
      if (threadIdx.x == 0) pmoe::add_acq_rel(&arrived, 1);
      while (pmoe::load_acquire(&arrived) < 2) pmoe::pause();
    });
  } catch (const emu::Error& error) {
    told = error.what();
  }
  emu::room = nullptr, emu::most_passes = 200000;
  expect(told.find("no end in sight") == 0, "a grid barrier must be found: " + told);
}

// ---- sorted lanes

// The network sorts every sequence of zeros and ones, and so (Knuth, vol. 3, 5.3.4) every sequence.
template <int kCount>
void check_sort() {
  for (uint32_t bits = 0; bits < 1u << kCount; ++bits) {
    uint64_t rank[kCount];
    int ones = 0;
    for (int i = 0; i < kCount; ++i) ones += static_cast<int>(rank[i] = bits >> i & 1);
    sort_ranks(rank);
    for (int i = 0; i < kCount; ++i)
      expect(rank[i] == (i < ones), "the sorting of " + std::to_string(kCount));
  }
}

// ---- merged lists

// One warp merges ranks of 0 and 1: every lane then has the rank of its place in the list.
template <class S, int kBest>
void check_levels() {
  using M = Merging<S, kBest>;
  for (int round = 0; round < 60; ++round) {
    const int share = draw(1, 60);
    std::vector<int> ones(S::kTokens);
    std::vector<std::vector<uint32_t>> ranks(32, std::vector<uint32_t>(S::kPer));
    for (int lane = 0; lane < 32; ++lane)
      for (uint32_t& each : ranks[lane]) ones[lane / S::kLanes] += each = draw(0, share) == 0;
    emu::launch(1, 32, generator(), [&] {
      const int lane = static_cast<int>(threadIdx.x), of_token = lane % S::kLanes;
      uint32_t rank[S::kPer];
      for (int j = 0; j < S::kPer; ++j) rank[j] = ranks[lane][j];
      sort_ranks(rank);
      pmoe::unrolled<M::kLevels>(
          [&](auto level) { merge_level<S, kBest, decltype(level)::value>(rank, of_token); });
      expect(rank[0] == (M::place(of_token) < ones[lane / S::kLanes]), "the merging of ranks");
      expect(M::place(M::lane(M::place(of_token))) == M::place(of_token), "the lane of a place");
    });
  }
}

// Whether the upper bits of a token's scores leave it open which experts are its best top_k, or their order.
template <class S>
bool is_unclear(const float* row, int experts, int top_k) {
  std::vector<uint32_t> key(S::kExperts, order_key(-kInfinity));
  for (int e = 0; e < experts; ++e) key[e] = order_key(row[e]);
  std::sort(key.rbegin(), key.rend());
  for (int k = 0; k < top_k && k + 1 < S::kExperts; ++k)
    if ((key[k] ^ key[k + 1]) < S::kExperts) return true;
  return false;
}

// Chooses for one warp's tokens by merging and by maxima. Returns whether merging has decided.
template <class S, int kBest>
bool check_merging(int experts, int top_k, Values values, int tokens) {
  Array<float> logits(S::kTokens * experts);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = draw_logit(values);
  for (int twin = values == Values::kDistinct ? draw(0, 3) : 0; twin == 1; twin = 0) {  // a score's neighbour
    float* const row = logits.get() + draw(0, tokens - 1) * experts;
    row[draw(0, experts - 1)] = std::nextafter(row[draw(0, experts - 1)], kInfinity);
  }
  const Rows rows{tokens, experts, false};
  const auto size = static_cast<size_t>(S::kTokens * top_k);
  std::vector<float> merged(size, -1.0f), expected(size);
  std::vector<int32_t> merged_expert(size, -1), expected_expert(size);
  int decided = 0;
  emu::launch(1, 32, generator(), [&] {
    Place<S> at;
    const bool exists = at.token < tokens;
    float x[S::kPer], numerator[S::kPer];
    load_row<S>(logits.get(), rows, at.token, exists, at.of_token, x);
    const Softmax found = softmax<S>(x, numerator);
    const int begin = at.token * top_k;
    const bool has = choose_by_merging<S, kBest>(x, numerator, found.sum, top_k, at, exists,
                                                 merged.data() + begin, merged_expert.data() + begin);
    decided += has;
    choose_by_maxima<S>(x, numerator, found.sum, experts, top_k, at.of_token, expected.data() + begin,
                        expected_expert.data() + begin);
  });
  bool unclear = false;
  for (int t = 0; t < tokens; ++t) unclear |= is_unclear<S>(logits.get() + t * experts, experts, top_k);
  const std::string told = "merging of " + std::to_string(experts) + " by " + std::to_string(S::kLanes) +
                           " lanes, " + std::to_string(top_k) + " of " + std::to_string(kBest);
  expect(decided == (unclear ? 0 : 32), told + ": decided");
  for (int i = 0; i < tokens * top_k; ++i) {
    if (unclear) {
      expect(merged_expert[i] == -1, told + ": wrote what is not decided");
      continue;
    }
    expect(merged_expert[i] == expected_expert[i], told + ": expert");
    expect(std::memcmp(&merged[i], &expected[i], sizeof(float)) == 0, told + ": probability");
  }
  return !unclear;
}

// Draws sizes and values. Merging must decide most of the draws whose scores differ.
template <class S, int kBest>
void check_merged() {
  check_levels<S, kBest>();
  int decided = 0;
  for (int i = 0; i < 60; ++i) {
    const int top_k = i % 3 ? draw(1, kBest) : kBest,
              experts = draw(std::max(top_k, S::kExperts / 2 + 1), S::kExperts);
    const auto values = static_cast<Values>(i % 6 < 4 ? 0 : i % 6 - 3);
    decided += check_merging<S, kBest>(experts, top_k, values, draw(1, S::kTokens));
  }
  expect(decided > 20 && decided < 50, std::to_string(decided) + " of 60 were decided by merging");
}

void check_ranks() {
  expect(rank_of(7, 3) > rank_of(6, 0), "the higher score wins");
  expect(rank_of(7, 3) > rank_of(7, 4), "of equal scores the first expert wins");
  expect(rank_of(0, 3) == 0 && rank_of(1, kMostExperts - 1) > 0, "0 stands for no expert");
}

// ---- cases

template <class S>
void check_case(const Case& c) {
  Array<float> logits(c.tokens * c.experts);
  for (size_t i = 0; i < logits.size(); ++i) logits[i] = draw_logit(c.values);
  try {
    Found found = run_forward<S>(c, logits, generator());
    check_choices(c, logits.get(), found);
    check_places(c, found);
    check_loss(c, logits.get(), found);
    check_messages(c, logits, found);
    // Other threads come first this time, and the workspace is used again.
    expect(run_forward<S>(c, logits, generator()) == found, "two runs differ");
    if (draw(0, 2) == 0) check_late_blocks<S>(c, logits, found);
    check_backward<S>(c, logits, found);
  } catch (const std::exception& error) {
    throw std::runtime_error(c.told() + ": " + error.what());
  }
}

Case draw_case(int most_tokens, int least_experts, int most_experts) {
  Case c{};
  c.tokens = draw(0, 9) ? draw(0, most_tokens) : draw(0, 1);
  c.experts = draw(least_experts, most_experts);
  c.top_k = draw(1, std::min(c.experts, draw(0, 3) ? 4 : kMostChoices));
  c.chunks = draw(0, 1) ? 1 : draw(1, 4);
  c.chunk_blocks = draw(1, std::max(1, 5 / c.chunks));
  c.normalize = draw(0, 1);
  c.z_weight = draw(0, 1) ? 0.0f : 0.25f;
  c.values = static_cast<Values>(draw(0, 2));
  c.whole_words = c.experts % 4 == 0 && draw(0, 1);
  c.sorted_chunks = draw(0, 1) ? c.chunks : c.chunks % 2 ? 1 : 2;
  c.first_last = draw(0, c.experts);
  c.num_last = draw(0, 2) ? draw(0, c.experts - c.first_last) : 0;
  return c;
}

template <class S>
void check_shape(int cases, int most_tokens, int least_experts) {
  for (int i = 0; i < cases; ++i) check_case<S>(draw_case(most_tokens, least_experts, S::kExperts));
}

// An expert's rows of a warp in several rounds of 32 slots, and all tokens with one expert.
void check_crowded() {
  for (int experts : {1, 2, 3})
    check_case<Shape<1, 4, 2>>({300, experts, 1, 2, 1, false, false, 0.5f, Values::kTied});
  check_case<Shape<2, 8, 1>>({200, 16, 16, 1, 2, true, true, 0.0f, Values::kTied});
  check_case<Shape<4, 8, 2>>({3, 20, 2, 64, 1, true, true, 0.0f, Values::kDistinct});
  // As many chunks as there may be, sorted by groups of 64.
  check_case<Shape<4, 8, 1>>({600, 20, 2, kMostChunks, 1, true, true, 0.0f, Values::kDistinct, 64, 5, 5});
}

void check_sizes() {
  expect(chunk_blocks(0, 4, 64, 131) == 1, "no tokens still take a block a chunk");
  expect(chunk_blocks(32768, 1, 64, 131) == 131, "no more blocks than there may be");
  expect(chunk_blocks(32768, 4, 64, 131) == 32, "as many in every chunk");
  expect(chunk_blocks(1000, 1, 64, 131) == 16 && chunk_blocks(1000, 3, 64, 131) == 6, "a round of each warp");
  expect(order_key(kNaN) > order_key(kInfinity) && order_key(-kNaN) == order_key(kNaN), "NaN is the largest");
  expect(order_key(-0.0f) == order_key(0.0f) && order_key(-kInfinity) == order_key(-FLT_MAX), "equals");
  expect(order_key(1e-42f) > order_key(0.0f) && order_key(-1e-42f) < order_key(0.0f),
         "denormal numbers count");
  expect(order_key(-kInfinity) > 0, "0 stands for no expert");
}

}  // namespace

int main(int argc, char** argv) {
  const int rounds = argc > 1 ? std::atoi(argv[1]) : 1;
  try {
    check_sizes();
    check_ranks();
    check_sort<4>(), check_sort<8>(), check_sort<16>();
    check_merged<Shape<8, 8, 1>, 4>(), check_merged<Shape<8, 8, 1>, 8>();
    check_merged<Shape<16, 8, 1>, 4>(), check_merged<Shape<16, 8, 1>, 8>(),
        check_merged<Shape<16, 8, 1>, 16>();
    check_merged<Shape<32, 8, 1>, 4>(), check_merged<Shape<32, 8, 1>, 8>(),
        check_merged<Shape<32, 8, 1>, 16>();
    check_that_waits_are_found();
    check_crowded();
    check_halves(0, 8, 8, 1);
    check_halves(37, 5, 8, 2);
    check_halves(130, 8, 72, 3);
    for (int round = 0; round < rounds; ++round) {
      generator.seed(static_cast<unsigned>(round + 1));
      check_shape<Shape<1, 8, 1>>(20, 90, 1);
      check_shape<Shape<2, 4, 2>>(20, 60, 1);
      check_shape<Shape<4, 8, 2>>(15, 40, 1);
      check_shape<Shape<8, 8, 2>>(12, 40, 1);
      check_shape<Shape<16, 8, 1>>(8, 20, 1);
      check_shape<Shape<32, 4, 2>>(8, 12, 20);
      check_shape<Shape<32, 8, 2>>(4, 12, 65);
      check_shape<Shape<32, 16, 1>>(2, 9, 257);
      check_shape<Shape<32, 32, 2>>(1, 9, 700);
    }
    check_case<Kept<32, 32>>({70, 1001, 32, 2, 1, true, false, 0.25f, Values::kTied});
    // As many choices as lanes; as many experts as choices.
    check_case<Kept<32, 8>>({40, 256, 32, 1, 1, true, true, 0.25f, Values::kTied});
    check_case<Kept<32, 4>>({40, 32, 32, 1, 1, false, true, 0.25f, Values::kStrange});
    check_case<Kept<8, 8>>({150, 64, 2, 1, 2, true, true, 0.25f, Values::kDistinct});
  } catch (const std::exception& error) {
    std::printf("FAILED: %s\n", error.what());
    return 1;
  }
  std::printf("route: all right\n");
  return 0;
}
