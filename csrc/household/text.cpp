// What the world says: ALFWorld's grammar, word for word.
#include <algorithm>

#include "household/world.h"

namespace manus_fast::household {
namespace {

// Joins "a x" as the grammar does: "nothing", "a x", "a x, and a y", "a x, a y, and a z".
class List {
 public:
  explicit List(std::string& out) : out_(out) {}

  void add(const std::string& name) {
    if (pending_ != nullptr) {
      if (any_) out_ += ", ";
      out_ += "a ";
      out_ += *pending_;
      any_ = true;
    }
    pending_ = &name;
  }

  void finish() {
    if (pending_ == nullptr) {
      out_ += "nothing";
      return;
    }
    if (any_) out_ += ", and ";
    out_ += "a ";
    out_ += *pending_;
  }

 private:
  std::string& out_;
  const std::string* pending_ = nullptr;  // written once it is known whether it is the last
  bool any_ = false;
};

const char kHelpMove[] =  // the grammar's starts with an empty line, which its parser skips
    "Available commands:\n"
    "  look:                             look around your current location\n"
    "  inventory:                        check your current inventory\n"
    "  go to (receptacle):               move to a receptacle\n"
    "  open (receptacle):                open a receptacle\n"
    "  close (receptacle):               close a receptacle\n"
    "  take (object) from (receptacle):  take an object from a receptacle\n"
    "  move (object) to (receptacle):  place an object in or on a receptacle\n"
    "  examine (something):              examine a receptacle or an object\n"
    "  use (object):                     use an object\n"
    "  heat (object) with (receptacle):  heat an object using a receptacle\n"
    "  clean (object) with (receptacle): clean an object using a receptacle\n"
    "  cool (object) with (receptacle):  cool an object using a receptacle\n"
    "  slice (object) with (object):     slice an object using a sharp object\n";

void help(bool put_grammar, std::string& out) {
  out += kHelpMove;
  if (!put_grammar) return;
  const std::string_view move = "  move (object) to (receptacle):  place";
  out.replace(out.find(move), move.size(), "  put (object) in/on (receptacle):  place");
}

}  // namespace

void World::contents(const State& state, int receptacle, std::string& out) const {
  List list(out);
  for (std::size_t o = 0; o < spec_.objects.size(); ++o) {
    if (lies_in(state, static_cast<int>(o), receptacle)) list.add(spec_.objects[o].name);
  }
  list.finish();
}

void World::describe_receptacle(const State& state, int receptacle, std::string& out) const {
  const ReceptacleSpec& r = spec_.receptacles[receptacle];
  if (r.openable) {
    out += "The ";
    out += r.name;
    if (!state.is_open(receptacle)) {
      out += " is closed.";
      return;
    }
    out += " is open. In it, you see ";
  } else {
    out += "On the ";
    out += r.name;
    out += ", you see ";
  }
  contents(state, receptacle, out);
  out += '.';
}

void World::describe_object(const State& state, int object, std::string& out) const {
  const ObjectSpec& o = spec_.objects[object];
  const std::uint8_t conditions = state.conditions[object];
  const bool clean = conditions & kClean, hot = conditions & kHot, cool = conditions & kCool;
  const bool sliced = conditions & kSliced;
  if (o.properties & kHolds) {
    out += "This is a normal ";
    out += o.name;
    out += ". In it, you see ";
    List list(out);
    for (const std::uint8_t inner : o.inside) list.add(spec_.objects[inner].name);
    list.finish();
    out += '.';
    return;
  }
  // A lamp that is off says nothing special: the engine never holds the negated fact its "is off" line asks for.
  if (!clean && !hot && !cool && o.properties & kToggleable && conditions & kToggled) {
    out += "This ";
    out += o.name;
    out += " is on.";
    return;
  }
  const char* how = nullptr;
  if (clean && hot) how = sliced ? "hot and clean sliced" : "hot and clean";
  else if (clean && cool) how = sliced ? "cool and clean sliced" : "cool and clean";
  else if (clean) how = sliced ? "clean sliced" : "clean";
  else if (hot) how = sliced ? "hot sliced" : "hot";
  else if (cool) how = sliced ? "cool sliced" : "cold";
  else if (sliced && o.properties & kSliceable) how = "sliced";
  if (how == nullptr) {
    out += "There's nothing special about ";
    out += o.name;
  } else {
    out += "This is a ";
    out += how;
    out += ' ';
    out += o.name;
  }
  out += '.';
}

// `everywhere`: the introduction lists all receptacles; "look" in the middle of the room lists none of them, since
// the engine binds the list to the player's location.
void World::look(const State& state, bool everywhere, std::string& out) const {
  const std::vector<std::uint8_t>& here = at_[state.location];
  if (!here.empty()) {
    out += "You are facing the ";
    for (std::size_t i = 0; i < here.size(); ++i) {
      if (i > 0) out += i + 1 == here.size() ? ", and " : ", ";
      out += spec_.receptacles[here[i]].name;
    }
    out += ". Next to it, you see ";
    List list(out);
    // What was taken from one of the receptacles here and put into another counts as next to the first.
    for (std::size_t o = 0; here.size() > 1 && o < spec_.objects.size(); ++o) {
      if (state.left[o] == 0 || !is_at(state, static_cast<int>(o), state.location)) continue;
      for (const std::uint8_t r : here) {
        if (state.left[o] >> shared_[r] & 1) list.add(spec_.objects[o].name);
      }
    }
    list.finish();
    out += '.';
    return;
  }
  out += "You are in the middle of a room. Looking quickly around you, you see ";
  List list(out);
  if (everywhere) {
    for (const ReceptacleSpec& r : spec_.receptacles) {
      if (r.location != kNone) list.add(r.name);
    }
  }
  list.finish();
  out += '.';
}

void World::intro(const State& state, std::string& out) const {
  out = "-= Welcome to TextWorld, ALFRED! =-\n\n";
  look(state, true, out);
  out += "\n\nYour task is to: ";
  out += spec_.task;
  out += '.';
}

void World::feedback(const State& state, const Command& command, std::string& out) const {
  const std::string* r = command.receptacle != kNone ? &spec_.receptacles[command.receptacle].name : nullptr;
  const std::string* o = command.object != kNone ? &spec_.objects[command.object].name : nullptr;
  const auto with = [&](const char* verb) {
    out += "You ";
    out += verb;
    out += " the ";
    out += *o;
    out += " using the ";
    out += *r;
    out += '.';
  };
  switch (command.verb) {
    case Verb::kLookAround:
      look(state, false, out);
      break;
    case Verb::kInventory:
      if (state.held == kNone) {
        out += "You are not carrying anything.";
      } else {
        out += "You are carrying: a ";
        out += spec_.objects[state.held].name;
        out += '.';
      }
      break;
    case Verb::kHelp:
      help(spec_.put_grammar, out);
      break;
    case Verb::kGo:
      out += "You arrive at ";
      out += spec_.receptacles[command.receptacle].arrival.empty() ? *r : spec_.receptacles[command.receptacle].arrival;
      out += ". ";
      describe_receptacle(state, command.receptacle, out);
      break;
    case Verb::kOpen:
      out += "You open the ";
      out += *r;
      out += ". ";
      describe_receptacle(state, command.receptacle, out);
      break;
    case Verb::kClose:
      out += "You close the ";
      out += *r;
      out += '.';
      break;
    case Verb::kExamineReceptacle:
      describe_receptacle(state, command.receptacle, out);
      break;
    case Verb::kExamineObject:
      describe_object(state, command.object, out);
      break;
    case Verb::kTake:
      out += "You pick up the ";
      out += *o;
      out += " from the ";
      out += *r;
      out += '.';
      break;
    case Verb::kPut:
      out += spec_.put_grammar ? "You put the " : "You move the ";
      out += *o;
      out += spec_.put_grammar ? " in/on the " : " to the ";
      out += *r;
      out += '.';
      break;
    case Verb::kUse:
      out += "You turn on the ";
      out += *o;
      out += '.';
      break;
    case Verb::kCleanWith:
      with("clean");
      break;
    case Verb::kHeatWith:
      with("heat");
      break;
    case Verb::kCoolWith:
      with("cool");
      break;
    case Verb::kSlice:
      out += "You sliced the ";
      out += *o;
      out += " with the ";
      out += spec_.objects[command.tool].name;
      out += '.';
      break;
  }
}

void World::command_text(const Command& command, std::string& out) const {
  const std::string* r = command.receptacle != kNone ? &spec_.receptacles[command.receptacle].name : nullptr;
  const std::string* o = command.object != kNone ? &spec_.objects[command.object].name : nullptr;
  const auto one = [&](const char* verb, const std::string* name) {
    out += verb;
    out += *name;
  };
  const auto two = [&](const char* verb, const char* word, const std::string* second) {
    out += verb;
    out += *o;
    out += word;
    out += *second;
  };
  switch (command.verb) {
    case Verb::kLookAround: out += "look"; break;
    case Verb::kInventory: out += "inventory"; break;
    case Verb::kHelp: out += "help"; break;
    case Verb::kGo: one("go to ", r); break;
    case Verb::kOpen: one("open ", r); break;
    case Verb::kClose: one("close ", r); break;
    case Verb::kExamineReceptacle: one("examine ", r); break;
    case Verb::kExamineObject: one("examine ", o); break;
    case Verb::kTake: two("take ", " from ", r); break;
    case Verb::kPut: spec_.put_grammar ? two("put ", " in/on ", r) : two("move ", " to ", r); break;
    case Verb::kUse: one("use ", o); break;
    case Verb::kCleanWith: two("clean ", " with ", r); break;
    case Verb::kHeatWith: two("heat ", " with ", r); break;
    case Verb::kCoolWith: two("cool ", " with ", r); break;
    case Verb::kSlice: two("slice ", " with ", &spec_.objects[command.tool].name); break;
  }
}

// Verbs come in the order of the alphabet and names in byte order, so nothing has to be sorted here.
int World::admissible(const State& state, std::string& out) const {
  int count = 0;
  Command c;
  const auto emit = [&] {
    command_text(c, out);
    out += '\n';
    ++count;
  };
  // The receptacles here, in the byte order of their names.
  std::array<std::uint8_t, kMaxReceptacles> here{};
  std::size_t num_here = 0;
  for (const std::uint8_t r : at_[state.location]) here[num_here++] = r;
  if (num_here > 1) {
    std::sort(here.begin(), here.begin() + num_here, [&](int a, int b) { return rank_[a] < rank_[b]; });
  }
  const auto per_receptacle = [&](Verb verb, std::uint8_t object) {
    for (std::size_t i = 0; i < num_here; ++i) {
      c = {verb, object, here[i], kNone};
      if (applicable(state, c)) emit();
    }
  };
  // The objects that are in reach: held, or in an accessible receptacle here.
  std::array<std::uint8_t, kMaxObjects> near{};
  std::size_t num_near = 0;
  std::uint16_t near_properties = 0;
  for (const std::uint8_t o : objects_by_name_) {
    if (state.held == o || lies_here(state, o)) {
      near[num_near++] = o;
      near_properties |= spec_.objects[o].properties;
    }
  }
  const std::uint8_t held = state.held;
  if (held != kNone) per_receptacle(Verb::kCleanWith, held);
  per_receptacle(Verb::kClose, kNone);
  if (held != kNone) per_receptacle(Verb::kCoolWith, held);
  for (std::size_t i = 0, j = 0; i < num_here || j < num_near;) {  // "examine": receptacles and objects merged
    const bool receptacle =
        j == num_near || (i < num_here && spec_.receptacles[here[i]].name < spec_.objects[near[j]].name);
    c = receptacle ? Command{Verb::kExamineReceptacle, kNone, here[i++], kNone}
                   : Command{Verb::kExamineObject, near[j++], kNone, kNone};
    if (applicable(state, c)) emit();
  }
  std::uint32_t from = 0;
  for (std::size_t i = 0; i < num_here; ++i) {  // everywhere but here
    out.append(go_text_, from, go_begin_[rank_[here[i]]] - from);
    from = go_begin_[rank_[here[i]] + 1];
  }
  out.append(go_text_, from);
  count += static_cast<int>(go_begin_.size() - 1 - num_here);
  if (held != kNone) per_receptacle(Verb::kHeatWith, held);
  c = {Verb::kHelp, kNone, kNone, kNone};
  if (spec_.help) emit();
  c = {Verb::kInventory, kNone, kNone, kNone};
  emit();
  c = {Verb::kLookAround, kNone, kNone, kNone};
  emit();
  if (held != kNone && !spec_.put_grammar) per_receptacle(Verb::kPut, held);
  per_receptacle(Verb::kOpen, kNone);
  if (held != kNone && spec_.put_grammar) per_receptacle(Verb::kPut, held);
  if (held != kNone && spec_.objects[held].properties & kKnife) {
    for (const std::uint8_t o : objects_by_name_) {
      c = {Verb::kSlice, o, kNone, held};
      if (applicable(state, c)) emit();
    }
  }
  for (std::size_t j = 0; held == kNone && j < num_near; ++j) {
    if (spec_.objects[near[j]].properties & kSpread) {
      per_receptacle(Verb::kTake, near[j]);
    } else {
      c = {Verb::kTake, near[j], state.place[near[j]], kNone};
      if (applicable(state, c)) emit();
    }
  }
  for (std::size_t j = 0; near_properties & kToggleable && j < num_near; ++j) {
    c = {Verb::kUse, near[j], kNone, kNone};
    if (applicable(state, c)) emit();
  }
  return count;
}

}  // namespace manus_fast::household
