#include "household/batch.h"

#include <cstring>

#include "common/check.h"
#include "common/parallel.h"
#include "common/rng.h"

namespace manus_fast::household {
namespace {

constexpr std::int64_t kStepGrain = 32;  // worlds a thread takes at a time: some 50 µs of work
constexpr std::int64_t kResetGrain = 2;

// What save() writes before the state.
struct Header {
  char magic[8] = {'m', 'f', 'h', 'o', 'u', 's', 'e', '1'};
  std::uint64_t checksum = 0;  // of recipe and state
  std::uint64_t fingerprint = 0;
  Recipe recipe;
};
static_assert(sizeof(Header) == 48);

// Finds accidents, not malice: restore checks every index besides. Four chains side by side, as saving is on the path
// of a tree search.
std::uint64_t checksum(const Recipe& recipe, const State& state) {
  std::uint64_t h[4] = {1, 2, 3, 4};
  const auto add = [&h](const void* data, std::size_t size) {
    for (std::size_t i = 0; i < size / sizeof(std::uint64_t); ++i) {
      std::uint64_t word;
      std::memcpy(&word, static_cast<const char*>(data) + i * sizeof(word), sizeof(word));
      std::uint64_t& chain = h[i % 4];
      chain = (chain ^ word) * 0x9E3779B97F4A7C15ull;
      chain ^= chain >> 32;
    }
  };
  static_assert(sizeof(Recipe) % sizeof(std::uint64_t) == 0 && sizeof(State) % sizeof(std::uint64_t) == 0);
  add(&recipe, sizeof(Recipe));
  add(&state, sizeof(State));
  return mix64(mix64(mix64(mix64(h[0]) ^ h[1]) ^ h[2]) ^ h[3]);
}

}  // namespace

Batch::Batch(int slots, int max_steps) : slots_(), max_steps_(max_steps) {
  MF_CHECK(slots >= 1, "slots: expected a count >= 1, got ", slots);
  MF_CHECK(max_steps >= 1 && max_steps <= 65535, "max_steps: expected 1 … 65535, got ", max_steps);
  slots_.resize(slots);
}

const Batch::Slot& Batch::at(int slot) const {
  MF_CHECK(slot >= 0 && slot < this->slots(), "slot: expected 0 … ", this->slots() - 1, ", got ", slot);
  MF_CHECK(slots_[slot].world != nullptr, "slot ", slot, ": it has no game yet, reset it first");
  return slots_[slot];
}

void Batch::check_slots(const std::vector<int>& slots, bool need_world) const {
  std::vector<bool> used(slots_.size());
  for (const int slot : slots) {
    MF_CHECK(slot >= 0 && slot < this->slots(), "slots: expected numbers 0 … ", this->slots() - 1, ", got ", slot);
    MF_CHECK(!used[slot], "slots: ", slot, " occurs twice in one call");
    used[slot] = true;
    if (need_world) at(slot);
  }
}

void Batch::list_commands(Slot& slot) {
  slot.commands.clear();
  slot.num_commands = slot.world->admissible(slot.state, slot.commands);
}

void Batch::reset(const std::vector<int>& slots, const std::vector<Recipe>& recipes) {
  MF_CHECK(recipes.size() == slots.size(), "tasks: expected one per slot (", slots.size(), "), got ", recipes.size());
  check_slots(slots, false);
  std::vector<std::shared_ptr<const World>> worlds(slots.size());
  const auto n = static_cast<std::int64_t>(slots.size());
  parallel_for(n, kResetGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      // The members of a group play the same game: generate it once per chunk.
      if (i > begin && std::memcmp(&recipes[i], &recipes[i - 1], sizeof(Recipe)) == 0) {
        worlds[i] = worlds[i - 1];
      } else {
        worlds[i] = generate(recipes[i]);
      }
    }
  });
  load(slots, worlds);
  for (std::size_t i = 0; i < slots.size(); ++i) slots_[slots[i]].recipe = recipes[i];
}

void Batch::load(const std::vector<int>& slots, const std::vector<std::shared_ptr<const World>>& worlds) {
  MF_CHECK(worlds.size() == slots.size(), "worlds: expected one per slot (", slots.size(), "), got ", worlds.size());
  check_slots(slots, false);
  for (const auto& world : worlds) MF_CHECK(world != nullptr, "worlds: expected a world per slot, got none");
  parallel_for(static_cast<std::int64_t>(slots.size()), kStepGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Slot& slot = slots_[slots[i]];
      slot.world = worlds[i];
      slot.recipe = Recipe();
      slot.world->reset(slot.state);
      slot.world->intro(slot.state, slot.text);
      list_commands(slot);
    }
  });
}

void Batch::step(const std::vector<int>& slots, const std::vector<std::string_view>& actions, float* reward,
                 std::uint8_t* terminated, std::uint8_t* truncated) {
  MF_CHECK(actions.size() == slots.size(), "actions: expected one per slot (", slots.size(), "), got ",
           actions.size());
  check_slots(slots, true);
  for (const int slot : slots) {
    MF_CHECK(!slots_[slot].state.over, "slot ", slot, ": its episode is over, reset or restore it first");
  }
  const auto n = static_cast<std::int64_t>(slots.size());
  parallel_for(n, kStepGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      Slot& slot = slots_[slots[i]];
      State& state = slot.state;
      slot.world->step(state, actions[i], slot.text);
      ++state.steps;
      reward[i] = state.won ? 1.0f : 0.0f;
      terminated[i] = state.won;
      truncated[i] = !state.won && state.steps >= max_steps_;
      state.over = terminated[i] || truncated[i];
      list_commands(slot);
    }
  });
}

void Batch::expert(const std::vector<int>& slots, ExpertKind kind, std::vector<std::string>& actions,
                   std::vector<std::string>& thoughts, bool brief) const {
  check_slots(slots, true);
  actions.assign(slots.size(), "");
  thoughts.assign(slots.size(), "");
  parallel_for(static_cast<std::int64_t>(slots.size()), kStepGrain, [&](std::int64_t begin, std::int64_t end) {
    for (std::int64_t i = begin; i < end; ++i) {
      const Slot& slot = slots_[slots[i]];
      const Move move = next_move(*slot.world, slot.state, kind);
      slot.world->command_text(move.command, actions[i]);
      thoughts[i] = brief ? subgoal(*slot.world, move) : thought(*slot.world, move);
    }
  });
}

void Batch::clone(int source, int destination) {
  const Slot& from = at(source);
  MF_CHECK(destination >= 0 && destination < this->slots(), "slot: expected 0 … ", this->slots() - 1, ", got ",
           destination);
  if (source == destination) return;
  slots_[destination] = from;
}

std::string Batch::save(int slot) const {
  const Slot& from = at(slot);
  Header header;
  header.fingerprint = from.world->fingerprint();
  header.recipe = from.recipe;
  header.checksum = checksum(from.recipe, from.state);
  std::string bytes(sizeof(Header) + sizeof(State), '\0');
  std::memcpy(bytes.data(), &header, sizeof(Header));
  std::memcpy(bytes.data() + sizeof(Header), &from.state, sizeof(State));
  return bytes;
}

void Batch::restore(int slot, std::string_view bytes) {
  MF_CHECK(slot >= 0 && slot < this->slots(), "slot: expected 0 … ", this->slots() - 1, ", got ", slot);
  MF_CHECK(bytes.size() == sizeof(Header) + sizeof(State), "state: expected ", sizeof(Header) + sizeof(State),
           " bytes made by save, got ", bytes.size());
  Header header;
  std::memcpy(&header, bytes.data(), sizeof(Header));
  State state;
  std::memcpy(&state, bytes.data() + sizeof(Header), sizeof(State));
  MF_CHECK(std::memcmp(header.magic, Header().magic, sizeof(header.magic)) == 0 &&
               header.checksum == checksum(header.recipe, state),
           "state: expected bytes made by save, got others");
  Slot& to = slots_[slot];
  std::shared_ptr<const World> world;
  if (to.world != nullptr && to.world->fingerprint() == header.fingerprint) {
    world = to.world;
  } else {
    world = generate(header.recipe);
    MF_CHECK(world->fingerprint() == header.fingerprint, "state: it was saved by another version of the generator");
  }
  MF_CHECK(world->valid(state), "state: expected bytes made by save, got others");
  to.world = std::move(world);
  to.recipe = header.recipe;
  to.state = state;
  to.text.clear();
  list_commands(to);
}

}  // namespace manus_fast::household
