#include "household/vocabulary.h"

#include <algorithm>
#include <sstream>

#include "common/check.h"

namespace manus_fast::household {

const std::array<const char*, kRooms> kRoomNames = {"kitchen", "bathroom", "bedroom", "livingroom"};

namespace {

// What a countertop and every kind of table take.
const char kTableTop[] =
    "alarmclock apple baseballbat basketball book bowl box bread butterknife candle cd cellphone cloth "
    "creditcard cup dishsponge egg fork glassbottle handtowel kettle keychain knife ladle laptop lettuce mug "
    "newspaper pan papertowel pen pencil peppershaker plate pot potato remotecontrol saltshaker soapbar "
    "soapbottle spatula spoon spraybottle statue tennisracket tissuebox toiletpaper toiletpaperroll tomato "
    "vase watch wateringcan winebottle";

struct Contains {
  const char* receptacle;
  const char* objects;
};

// ALFRED's canContain facts.
const Contains kContains[] = {
    {"coffeetable", kTableTop},
    {"countertop", kTableTop},
    {"diningtable", kTableTop},
    {"sidetable", kTableTop},
    {"armchair",
     "basketball book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol"},
    {"bathtubbasin",
     "cloth dishsponge handtowel soapbar"},
    {"bed",
     "baseballbat basketball book cellphone laptop newspaper pillow tennisracket"},
    {"cabinet",
     "book bowl box candle cd cloth cup dishsponge glassbottle handtowel kettle ladle mug newspaper pan "
     "peppershaker plate plunger pot saltshaker soapbar soapbottle spraybottle tissuebox toiletpaper "
     "toiletpaperroll vase wateringcan winebottle"},
    {"cart",
     "candle cloth dishsponge handtowel mug papertowel plunger soapbar soapbottle spraybottle statue tissuebox "
     "toiletpaper toiletpaperroll vase"},
    {"coffeemachine",
     "mug"},
    {"desk",
     "alarmclock basketball book bowl box candle cd cellphone cloth creditcard cup glassbottle keychain laptop "
     "mug newspaper pen pencil plate remotecontrol soapbottle spraybottle statue tennisracket tissuebox "
     "toiletpaper toiletpaperroll vase watch wateringcan winebottle"},
    {"drawer",
     "book butterknife candle cd cellphone cloth creditcard dishsponge fork handtowel keychain knife ladle "
     "newspaper pen pencil peppershaker remotecontrol saltshaker soapbar soapbottle spatula spoon spraybottle "
     "tissuebox toiletpaper toiletpaperroll watch wateringcan"},
    {"dresser",
     "alarmclock basketball book bowl box candle cd cellphone cloth creditcard cup glassbottle keychain laptop "
     "mug newspaper pen pencil plate remotecontrol spraybottle statue tennisracket tissuebox toiletpaper "
     "toiletpaperroll vase watch wateringcan winebottle"},
    {"fridge",
     "apple bowl bread cup egg glassbottle lettuce mug pan plate pot potato tomato winebottle"},
    {"garbagecan",
     "apple bread cd cloth dishsponge egg handtowel lettuce newspaper papertowel pen pencil potato soapbar "
     "soapbottle spraybottle tissuebox toiletpaper toiletpaperroll tomato winebottle"},
    {"handtowelholder",
     "handtowel"},
    {"laundryhamper",
     "cloth"},
    {"microwave",
     "apple bowl bread cup egg glassbottle mug plate potato tomato"},
    {"ottoman",
     "basketball book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol"},
    {"safe",
     "cd cellphone creditcard keychain statue vase watch"},
    {"shelf",
     "alarmclock book bowl box candle cd cellphone cloth creditcard cup dishsponge glassbottle handtowel "
     "kettle keychain mug newspaper papertowel pen pencil peppershaker plate pot remotecontrol saltshaker "
     "soapbar soapbottle spraybottle statue tissuebox toiletpaper toiletpaperroll vase watch wateringcan "
     "winebottle"},
    {"sinkbasin",
     "apple bowl butterknife cloth cup dishsponge egg fork glassbottle handtowel kettle knife ladle lettuce "
     "mug pan plate pot potato soapbar spatula spoon tomato"},
    {"sofa",
     "basketball book box cellphone cloth creditcard keychain laptop newspaper pillow remotecontrol"},
    {"stoveburner",
     "kettle pan pot"},
    {"tvstand",
     "tissuebox"},
    {"toaster", ""},
    {"toilet",
     "candle cloth dishsponge handtowel newspaper papertowel soapbar soapbottle spraybottle tissuebox "
     "toiletpaper toiletpaperroll"},
    {"toiletpaperhanger",
     "toiletpaper toiletpaperroll"},
    {"towelholder",
     "towel"},
};

// "class required limit weight; …" per room.
const char* const kRoomReceptacles[kRooms] = {
    "fridge 1 1 0; microwave 1 1 0; sinkbasin 1 1 0; countertop 1 3 3; cabinet 0 10 6; drawer 0 9 5; "
    "stoveburner 0 4 4; "
    "coffeemachine 0 1 2; toaster 0 1 2; garbagecan 0 1 2; diningtable 0 1 2; shelf 0 4 2; sidetable 0 1 1",
    "sinkbasin 1 2 1; countertop 1 2 1; toilet 1 1 0; bathtubbasin 0 1 2; cabinet 0 9 5; drawer 0 8 3; "
    "handtowelholder 0 3 3; towelholder 0 2 2; toiletpaperhanger 0 1 2; garbagecan 0 1 2; shelf 0 4 2; cart 0 1 1; "
    "laundryhamper 0 1 1",
    "bed 1 2 1; sidetable 1 2 2; desk 0 2 3; dresser 0 2 2; drawer 0 10 5; shelf 0 8 4; cabinet 0 6 2; "
    "garbagecan 0 1 2; "
    "armchair 0 2 2; laundryhamper 0 1 2; safe 0 1 1",
    "sofa 1 2 1; sidetable 1 3 2; coffeetable 0 2 3; tvstand 0 1 2; armchair 0 2 3; diningtable 0 1 1; drawer 0 10 4; "
    "shelf 0 8 3; cabinet 0 8 3; garbagecan 0 1 2; ottoman 0 1 1; dresser 0 1 1; safe 0 1 1; desk 0 1 1"};

struct ObjectRow {
  const char* name;
  const char* rooms;       // K kitchen, B bathroom, R bedroom, L living room
  const char* properties;  // c cleanable, h heatable, k coolable, s sliceable, t toggleable, r holds things, x fixed
  const char* homes;       // "class weight; …"
};

const ObjectRow kObjects[] = {
    {"alarmclock", "R", "", "desk 3; sidetable 4; dresser 2; shelf 1"},
    {"apple", "K", "chks",
     "countertop 4; diningtable 3; fridge 3; sinkbasin 1; garbagecan 1; microwave 1; sidetable 1"},
    {"baseballbat", "R", "", "bed 4; sidetable 1"},
    {"basketball", "R", "", "bed 2; armchair 2; desk 1; dresser 1; sidetable 1"},
    {"book", "RL", "",
     "desk 3; bed 3; shelf 3; drawer 1; sofa 1; coffeetable 2; sidetable 2; dresser 2; armchair 1; cabinet 1"},
    {"bowl", "KL", "ckr",
     "countertop 3; cabinet 3; fridge 1; diningtable 2; sinkbasin 1; shelf 2; coffeetable 1; sidetable 1; microwave 1"},
    {"box", "RL", "r",
     "coffeetable 2; sofa 2; armchair 1; diningtable 2; cabinet 1; sidetable 1; dresser 2; desk 1; shelf 1"},
    {"bread", "K", "hks", "countertop 4; diningtable 3; fridge 2; microwave 1; garbagecan 1"},
    {"butterknife", "K", "c", "countertop 3; drawer 4; diningtable 2; sinkbasin 1"},
    {"candle", "BL", "", "countertop 3; toilet 3; shelf 2; cabinet 1; drawer 1; coffeetable 2; sidetable 2; cart 1"},
    {"cd", "RL", "",
     "desk 3; drawer 2; shelf 2; safe 1; dresser 2; garbagecan 1; sidetable 2; coffeetable 1; cabinet 1"},
    {"cellphone", "RL", "",
     "desk 3; bed 3; drawer 2; sofa 2; dresser 2; coffeetable 2; armchair 1; safe 1; sidetable 2"},
    {"cloth", "B", "c",
     "bathtubbasin 3; countertop 2; cabinet 2; sinkbasin 1; toilet 1; laundryhamper 3; garbagecan 1; drawer 1; cart 1"},
    {"creditcard", "RL", "",
     "desk 2; drawer 2; sofa 1; coffeetable 2; dresser 3; safe 1; shelf 1; armchair 1; sidetable 3"},
    {"cup", "K", "chkr", "cabinet 3; countertop 3; sinkbasin 1; diningtable 2; fridge 1; microwave 1; shelf 2"},
    {"desklamp", "RL", "tx", "desk 4; sidetable 4; dresser 2; shelf 1; coffeetable 1"},
    {"dishsponge", "KB", "c", "sinkbasin 4; countertop 2; drawer 1; cabinet 1; bathtubbasin 2; garbagecan 1; cart 1"},
    {"egg", "K", "chks", "fridge 5; countertop 2; diningtable 1; sinkbasin 1; garbagecan 1; microwave 1"},
    {"fork", "K", "c", "drawer 4; countertop 2; diningtable 2; sinkbasin 1"},
    {"glassbottle", "K", "", "cabinet 2; countertop 2; fridge 1; shelf 2; diningtable 1"},
    {"handtowel", "B", "", "handtowelholder 8; cabinet 1; countertop 1; drawer 1"},
    {"houseplant", "KRL", "x",
     "countertop 2; diningtable 2; sidetable 2; shelf 2; coffeetable 2; dresser 2; desk 2; tvstand 1"},
    {"kettle", "K", "c", "stoveburner 5; countertop 2; cabinet 2; shelf 1; sinkbasin 1"},
    {"keychain", "RL", "",
     "sidetable 3; sofa 1; safe 1; drawer 2; desk 2; dresser 3; coffeetable 2; armchair 1; shelf 1"},
    {"knife", "K", "c", "countertop 3; drawer 3; sinkbasin 1; diningtable 2"},
    {"ladle", "K", "c", "countertop 2; drawer 3; cabinet 2; sinkbasin 1; diningtable 1"},
    {"laptop", "RL", "", "desk 4; bed 3; sofa 2; coffeetable 2; diningtable 1; dresser 1; armchair 1; ottoman 1"},
    {"lettuce", "K", "cks", "fridge 5; countertop 3; diningtable 2; sinkbasin 1; garbagecan 1"},
    {"mug", "KR", "chkr",
     "cabinet 2; countertop 2; coffeemachine 4; sinkbasin 1; desk 3; shelf 2; fridge 1; microwave 1; dresser 1; "
     "sidetable 1"},
    {"newspaper", "L", "",
     "coffeetable 3; sofa 3; drawer 1; armchair 2; ottoman 1; sidetable 1; diningtable 1; garbagecan 1"},
    {"pan", "K", "ckr", "stoveburner 6; countertop 2; cabinet 2; sinkbasin 1; fridge 1; diningtable 1"},
    {"pen", "RL", "", "desk 4; drawer 3; sidetable 2; shelf 1; dresser 1; garbagecan 1; coffeetable 1"},
    {"pencil", "RL", "", "desk 4; drawer 3; sidetable 2; shelf 1; dresser 1; garbagecan 1; coffeetable 1"},
    {"peppershaker", "K", "", "cabinet 2; countertop 3; drawer 2; diningtable 2; shelf 2; sidetable 1"},
    {"pillow", "RL", "", "bed 5; sofa 4; armchair 3; ottoman 1"},
    {"plate", "K", "chkr", "cabinet 3; countertop 2; diningtable 2; sinkbasin 1; fridge 1; shelf 2; microwave 1"},
    {"plunger", "B", "", "cabinet 3; cart 2"},
    {"pot", "K", "ckr", "stoveburner 6; countertop 2; cabinet 1; sinkbasin 1; fridge 1; shelf 1"},
    {"potato", "K", "chks", "countertop 3; fridge 3; sinkbasin 2; diningtable 2; garbagecan 1; microwave 1"},
    {"remotecontrol", "L", "",
     "sofa 4; coffeetable 3; armchair 3; sidetable 2; drawer 1; shelf 1; dresser 1; ottoman 1"},
    {"saltshaker", "K", "", "cabinet 2; countertop 3; drawer 2; diningtable 2; shelf 2; sidetable 1"},
    {"soapbar", "B", "c",
     "sinkbasin 3; countertop 2; bathtubbasin 2; toilet 1; drawer 1; cabinet 1; garbagecan 1; cart 1"},
    {"soapbottle", "KB", "", "countertop 4; cabinet 2; toilet 2; drawer 1; garbagecan 1; shelf 1"},
    {"spatula", "K", "c", "countertop 2; drawer 4; sinkbasin 1; diningtable 1"},
    {"spoon", "K", "c", "drawer 4; countertop 2; sinkbasin 1; diningtable 2"},
    {"spraybottle", "B", "", "cabinet 3; countertop 2; toilet 2; drawer 1; shelf 1; garbagecan 1; cart 1"},
    {"statue", "RL", "", "shelf 3; coffeetable 2; sidetable 2; dresser 3; safe 1; desk 1"},
    {"television", "L", "x", "tvstand 6; dresser 1"},
    {"tennisracket", "R", "", "bed 3; desk 1; dresser 2; sidetable 1"},
    {"tissuebox", "BRL", "",
     "toilet 3; countertop 1; sidetable 3; coffeetable 2; desk 2; shelf 1; drawer 1; tvstand 1; cart 1"},
    {"toiletpaper", "B", "", "toiletpaperhanger 6; toilet 4; cabinet 2; drawer 1; countertop 1; garbagecan 1; cart 1"},
    {"tomato", "K", "chks", "countertop 3; fridge 3; diningtable 2; sinkbasin 1; garbagecan 1; microwave 1"},
    {"towel", "B", "", "towelholder 1"},
    {"vase", "RL", "", "shelf 3; coffeetable 2; sidetable 2; dresser 2; cabinet 1; safe 1; desk 1"},
    {"watch", "RL", "", "shelf 2; coffeetable 2; sidetable 3; drawer 1; safe 2; dresser 2; desk 1"},
    {"wateringcan", "L", "", "shelf 2; sidetable 2; coffeetable 2; drawer 2; dresser 1"},
    {"winebottle", "K", "k", "fridge 3; countertop 2; cabinet 2; diningtable 2; shelf 1; garbagecan 1"},
};

std::vector<std::string> words(const char* text) {
  std::istringstream in(text);
  std::vector<std::string> out;
  for (std::string word; in >> word;) out.push_back(word);
  return out;
}

std::vector<std::vector<std::string>> rows(const char* text) {
  std::vector<std::vector<std::string>> out;
  std::istringstream in(text);
  for (std::string row; std::getline(in, row, ';');) out.push_back(words(row.c_str()));
  return out;
}

std::uint8_t number(const std::string& text) { return static_cast<std::uint8_t>(std::stoi(text)); }

std::uint16_t properties(const ObjectRow& row) {
  const std::string letters = row.properties;
  const std::string name = row.name;
  const auto has = [&](char c) { return letters.find(c) != std::string::npos; };
  std::uint16_t bits = 0;
  if (!has('x')) bits |= kPickupable;
  if (has('c')) bits |= kCleanable;
  if (has('h')) bits |= kHeatable;
  if (has('k')) bits |= kCoolable;
  if (has('s')) bits |= kSliceable;
  if (has('t')) bits |= kToggleable;
  if (has('r')) bits |= kHolds;
  if (name == "knife" || name == "butterknife") bits |= kKnife;
  return bits;
}

std::uint8_t rooms(const char* letters) {
  std::uint8_t bits = 0;
  for (const char* c = letters; *c != '\0'; ++c) {
    bits |= 1 << std::string("KBRL").find(*c);
  }
  return bits;
}

ReceptacleClass receptacle_class(const std::string& name) {
  ReceptacleClass r;
  r.name = name;
  const std::size_t basin = name.find("basin");
  r.order = basin == std::string::npos ? name : name.substr(0, basin);
  r.openable = name == "cabinet" || name == "drawer" || name == "fridge" || name == "microwave" || name == "safe";
  if (name == "sinkbasin") r.role = Role::kSink;
  if (name == "microwave") r.role = Role::kMicrowave;
  if (name == "fridge") r.role = Role::kFridge;
  return r;
}

Vocabulary build() {
  Vocabulary v;
  for (const Contains& row : kContains) v.receptacles.push_back(receptacle_class(row.receptacle));
  std::sort(v.receptacles.begin(), v.receptacles.end(),
            [](const ReceptacleClass& a, const ReceptacleClass& b) { return a.order < b.order; });
  for (const ReceptacleClass& r : v.receptacles) v.receptacle_names.push_back(r.name);
  const auto receptacle = [&](const std::string& name) {
    const int r = v.receptacle(name);
    MF_CHECK(r >= 0, "vocabulary: unknown receptacle class '", name, "'");
    return r;
  };
  for (const ObjectRow& row : kObjects) {
    ObjectClass o;
    o.name = row.name;
    o.properties = properties(row);
    o.rooms = rooms(row.rooms);
    o.homes.resize(v.receptacles.size());
    for (const auto& home : rows(row.homes)) o.homes[receptacle(home[0])] = number(home[1]);
    v.object_names.push_back(o.name);
    v.objects.push_back(std::move(o));
  }
  v.can_contain.assign(v.receptacles.size(), std::vector<bool>(v.objects.size()));
  for (const Contains& row : kContains) {
    const int r = receptacle(row.receptacle);
    for (const std::string& name : words(row.objects)) {
      const int o = v.object(name);
      if (o >= 0) v.can_contain[r][o] = true;  // the facts name classes that no room of ours has
    }
  }
  for (int room = 0; room < kRooms; ++room) {
    for (const auto& row : rows(kRoomReceptacles[room])) {
      v.rooms[room].push_back(
          {static_cast<std::uint8_t>(receptacle(row[0])), number(row[1]), number(row[2]), number(row[3])});
    }
  }
  return v;
}

}  // namespace

int Vocabulary::receptacle(std::string_view name) const {
  for (std::size_t i = 0; i < receptacles.size(); ++i) {
    if (receptacles[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

int Vocabulary::object(std::string_view name) const {
  for (std::size_t i = 0; i < objects.size(); ++i) {
    if (objects[i].name == name) return static_cast<int>(i);
  }
  return -1;
}

const Vocabulary& vocabulary() {
  static const Vocabulary* const instance = new Vocabulary(build());  // never destroyed: pool threads may outlive main
  return *instance;
}

}  // namespace manus_fast::household
