// Random shapes through whole programs for a number of seconds, every kernel set, meant to run under sanitizers:
//   kernels_fuzz [seconds [seed]]    (at least one model: that of the seed alone with 0 seconds)
// Each round builds a small random model (dense or experts, with latent attention or without, entries of tokens beside tokens, layers that attend to
// another's keys, streams beside each other, states beside attention, every weight and cache format, some adapters, its weights packed, or used in a file and
// moved while it answers) for two sets, computes one prompt whole, and again cut at random beside neighbours and over dirty blocks, both models at once; logits must agree bit
// for bit, the best found without them must be theirs, and tokens drawn from them are theirs, too. Where an index chooses, most prompts pass what it chooses. Exit 1 on a difference.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <thread>
#include <vector>

#include "fuzz_recorder.h"

namespace diptych {
namespace {

// Whether a step asked for the best alone finds what lies in the logits of the same step.
bool has_same_best(Program& program, const Step& step, KvCache& kv, const float* logits) {
  const std::vector<Best> best = program.run_best(step, kv);
  for (int64_t row = 0; row < step.n_logits; ++row) {
    const float *begin = logits + row * program.vocab(), *end = begin + program.vocab(), *largest = std::max_element(begin, end);
    if (best[row].value != *largest || best[row].index != largest - begin) return false;
  }
  return true;
}

// Whether tokens drawn from logits are there and have a weight, and are the same whatever is drawn beside them.
bool draws_alike(Program& program, World& world, const float* logits, int64_t n) {
  const auto draws = static_cast<size_t>(world.pick(1, 5));
  std::vector<int32_t> rows(draws);
  for (int32_t& row : rows) row = static_cast<int32_t>(world.pick(0, n - 1));
  const std::vector<float> temperatures = world.floats(static_cast<int64_t>(draws), 0.01f, 3.0f), drawn_at = world.floats(static_cast<int64_t>(draws), 0.0f, 1.0f);
  const std::vector<double> quantiles(drawn_at.begin(), drawn_at.end());
  std::vector<Drawn> drawn(draws);
  program.draw(logits, program.vocab(), rows.data(), static_cast<int64_t>(draws), temperatures.data(), quantiles.data(), drawn.data());
  for (size_t i = 0; i < draws; ++i) {
    Drawn alone;
    program.draw(logits, program.vocab(), rows.data() + i, 1, temperatures.data() + i, quantiles.data() + i, &alone);
    const float* begin = logits + rows[i] * program.vocab();
    if (alone.index != drawn[i].index || alone.total != drawn[i].total || alone.index < 0 || alone.index >= program.vocab()) return false;
    if (alone.best != *std::max_element(begin, begin + program.vocab()) || !(alone.total >= 1.0)) return false;
  }
  return true;
}

// Steps one prompt, cut into chunks, as sequence 0 of batches whose other sequences are noise. Returns its logits, or nothing where
// the best differ.
std::vector<float> answer(Program& program, World& world, const Model& m, const std::vector<int32_t>& prompt, int64_t largest_chunk, int64_t neighbours) {
  const int64_t n = static_cast<int64_t>(prompt.size()), per_sequence = (n + m.block_tokens - 1) / m.block_tokens;
  KvShape shape;
  shape.n_blocks = per_sequence * (1 + neighbours), shape.block_tokens = m.block_tokens, shape.format = m.kv;
  KvCache kv(shape, m.kept());
  if (neighbours) std::memset(kv.layer(0).data, 0xff, static_cast<size_t>(kv.bytes()));  // NaN everywhere
  const std::vector<int64_t> floats = m.state_floats();
  if (!floats.empty()) {  // two places a sequence: a step may run twice, and begins both times with what lay before it
    kv.add_states(floats, 3 * (1 + neighbours));
    if (kv.state_bytes() > 0) std::memset(kv.state(0, 0), 0xff, static_cast<size_t>(kv.state_bytes()));
  }
  std::vector<int32_t> places(1 + neighbours, -1);
  std::vector<int32_t> table(shape.n_blocks);
  for (size_t i = 0; i < table.size(); ++i) table[i] = static_cast<int32_t>(table.size() - 1 - i);
  std::vector<float> logits(n * m.vocab);
  std::vector<int64_t> lengths(1 + neighbours, 0);
  for (int64_t at = 0; at < n;) {
    std::vector<int32_t> ids, starts{0}, contexts, wanted, adapters, both_ways;
    for (int64_t s = 0; s <= neighbours; ++s) both_ways.push_back(m.both_ways && (s == 0 || world.pick(0, 1)));
    for (int64_t s = 0; s <= neighbours; ++s)
      adapters.push_back(static_cast<int32_t>(s == 0 ? prompt[0] % (m.n_adapters + 1) - 1 : world.pick(-1, m.n_adapters - 1)));
    for (int64_t s = 0; s <= neighbours; ++s) {
      const int64_t left = n - lengths[s], take = both_ways[s] || m.n_places != 0 ? left : std::min(left, world.pick(1, largest_chunk));
      for (int64_t i = 0; i < take; ++i) {
        ids.push_back(s == 0 ? prompt[lengths[s] + i] : static_cast<int32_t>(world.pick(0, m.vocab - 1)));
        if (s == 0) wanted.push_back(static_cast<int32_t>(i));
      }
      if (take == 0) {  // a neighbour at its end writes its last token again
        lengths[s] -= 1, --s;
        continue;
      }
      lengths[s] += take;
      starts.push_back(static_cast<int32_t>(ids.size())), contexts.push_back(static_cast<int32_t>(lengths[s]));
    }
    Step step{ids.data(), starts.data(), contexts.data(), table.data(), wanted.data(),
                    static_cast<int64_t>(ids.size()), 1 + neighbours, per_sequence, static_cast<int64_t>(wanted.size())};
    if (m.n_adapters > 0) step.adapters = adapters.data();
    if (m.both_ways) step.both_ways = both_ways.data();
    std::vector<int32_t> writes, saves;
    for (int32_t s = 0; s <= neighbours; ++s) {
      const int32_t rows = starts[s + 1] - starts[s];
      writes.push_back(places[s] == 3 * s ? 3 * s + 1 : 3 * s);
      if (world.pick(0, 1)) saves.insert(saves.end(), {s, static_cast<int32_t>(world.pick(1, rows)), 3 * s + 2});
    }
    if (!floats.empty()) step.state_reads = places.data(), step.state_writes = writes.data(), step.state_saves = saves.data(), step.n_saves = static_cast<int64_t>(saves.size()) / 3;
    program.run(step, kv, logits.data() + at * m.vocab);
    if (!has_same_best(program, step, kv, logits.data() + at * m.vocab)) return {};
    if (!draws_alike(program, world, logits.data() + at * m.vocab, step.n_logits)) return {};
    at += static_cast<int64_t>(wanted.size());
    places = writes;
  }
  return logits;
}

// Some, or some more than an index chooses; so many that attention, which takes longest, takes seconds under a sanitizer.
int64_t prompt_tokens(World& world, const Model& m, int64_t sequences) {
  const bool passes_choice = m.chosen() != 0 && world.pick(0, 3) != 0;
  const int64_t wanted = passes_choice ? m.chosen() + world.pick(1, 40) : world.pick(1, world.pick(0, 4) == 0 ? 600 : 60);
  const double of_pair = static_cast<double>(sequences * m.layers * m.n_heads * (m.head_dim + m.v_head_dim));
  return std::min(wanted, static_cast<int64_t>(std::sqrt(4e8 / of_pair)) + 1);
}

// One random model under two kernel sets (seldom the same one): each answers alone, and then both at once, cut at random. What a
// set answers must not depend on the other model. Returns the name of the set that went wrong, or null.
const char* round(uint64_t seed) {
  World world(seed);
  const Model m = world.model();
  const std::vector<float> table = world.floats(std::max<int64_t>(m.vocab, 600) * m.hidden, -1.0f, 1.0f);
  const int64_t largest_chunk = world.pick(1, 70), neighbours = world.pick(0, 4);
  std::vector<int32_t> prompt(prompt_tokens(world, m, 1 + neighbours));
  for (int32_t& id : prompt) id = static_cast<int32_t>(world.pick(0, m.vocab - 1));
  const auto n_sets = static_cast<int64_t>(kernel_sets().size());
  struct Side {
    World world;
    std::deque<MappedFile> files;  // outlive who uses them
    Program program;
    std::vector<float> whole, cut;
  };
  const bool is_mapped = world.pick(0, 2) == 0;
  std::vector<std::unique_ptr<Side>> sides;
  for (int i = 0; i < 2; ++i) {
    const KernelSet& set = *kernel_sets()[i == 0 ? seed % n_sets : world.pick(0, n_sets - 1)];
    const auto threads = static_cast<int>(world.pick(0, 15) == 0 ? world.pick(9, 12) : world.pick(1, 3));  // or more than share parts (Balance)
    sides.emplace_back(new Side{World(seed + 1), {}, Program(set, threads), {}, {}});
    Recorder(sides[i]->program, is_mapped ? &sides[i]->files : nullptr, sides[i]->world, m, table);
  }
  for (auto& side : sides) side->whole = answer(side->program, side->world, m, prompt, 1 << 20, 0);
  auto cut = [&](Side& side) { side.cut = answer(side.program, side.world, m, prompt, largest_chunk, neighbours); };
  std::thread beside([&] { cut(*sides[1]); });
  cut(*sides[0]);
  beside.join();
  for (const auto& side : sides) {
    bool is_right = !side->whole.empty() && side->whole.size() == side->cut.size() &&
                    std::memcmp(side->whole.data(), side->cut.data(), side->whole.size() * 4) == 0;
    for (float x : side->whole) is_right = is_right && x - x == 0.0f;
    if (!is_right) return side->program.kernels().name;
  }
  return nullptr;
}

}  // namespace
}  // namespace diptych

int main(int argc, char** argv) {
  using namespace diptych;
  using std::chrono::steady_clock;
  const double seconds = argc > 1 ? std::atof(argv[1]) : 10;
  const uint64_t first = argc > 2 ? std::strtoull(argv[2], nullptr, 10) : 1;
  const auto begin = steady_clock::now();
  uint64_t seed = first;
  do {
    const char* wrong = round(seed);
    if (wrong == nullptr) continue;
    std::printf("%s: bits or the best differ, or a logit is not finite, with seed %llu\n", wrong, static_cast<unsigned long long>(seed));
    return 1;
  } while (++seed, std::chrono::duration<double>(steady_clock::now() - begin).count() < seconds);
  std::printf("%llu random models without a differing bit\n", static_cast<unsigned long long>(seed - first));
  return 0;
}
