// The classes of things that rooms of ALFRED hold (Shridhar et al., "ALFRED", CVPR 2020): which receptacle takes
// which object, what can be done with it, and our own guess of where a household keeps it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "household/world.h"

namespace manus_fast::household {

enum class Room : std::uint8_t { kKitchen, kBathroom, kBedroom, kLivingRoom };
constexpr int kRooms = 4;
extern const std::array<const char*, kRooms> kRoomNames;

struct ReceptacleClass {
  std::string name;
  std::string order;  // where lists sort it: an id of ALFRED starts with "sink", not with "sinkbasin"
  bool openable = false;
  Role role = Role::kPlain;
};

// A receptacle class in a room: at least `required` of them, at most `limit`; `weight` for the optional ones.
struct RoomReceptacle {
  std::uint8_t receptacle;
  std::uint8_t required;
  std::uint8_t limit;
  std::uint8_t weight;
};

struct ObjectClass {
  std::string name;
  std::uint16_t properties = 0;
  std::uint8_t rooms = 0;            // bit per Room
  std::vector<std::uint8_t> homes;   // weight per receptacle class, 0: not found there
};

struct Vocabulary {
  std::vector<ReceptacleClass> receptacles;  // sorted by `order`
  std::vector<ObjectClass> objects;          // sorted by name
  std::vector<std::vector<bool>> can_contain;  // [receptacle class][object class]
  std::vector<RoomReceptacle> rooms[kRooms];
  std::vector<std::string> receptacle_names;  // the names alone, as WorldSpec wants them
  std::vector<std::string> object_names;

  int receptacle(std::string_view name) const;  // index, or -1
  int object(std::string_view name) const;
};

const Vocabulary& vocabulary();

}  // namespace manus_fast::household
