// The wheel of ends against a sorted map, over random additions, removals and turns.
#include <map>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "check.hpp"
#include "end_wheel.hpp"

using namespace simcluster;

namespace {

// What is in the wheel, kept plainly.
struct Plain {
  std::set<std::pair<std::int64_t, std::int32_t>> ends;  // (pass, slot)
  std::map<std::int32_t, std::int64_t> pass_of;

  std::int64_t first() const { return ends.empty() ? EndWheel::kNever : ends.begin()->first; }
  void add(std::int64_t pass, std::int32_t slot) {
    ends.insert({pass, slot});
    pass_of[slot] = pass;
  }
  bool remove(std::int32_t slot) {
    const auto it = pass_of.find(slot);
    if (it == pass_of.end()) return false;
    ends.erase({it->second, slot});
    pass_of.erase(it);
    return true;
  }
};

void both_tell_the_same_ends(unsigned seed, std::int64_t farthest) {
  std::mt19937 random(seed);
  const auto below = [&](std::int64_t n) { return static_cast<std::int64_t>(random() % static_cast<unsigned>(n)); };
  EndWheel wheel;
  wheel.clear();
  Plain plain;
  std::int64_t now = below(3000);
  for (int i = 0; i < 20'000; ++i) {
    const auto slot = static_cast<std::int32_t>(below(200));
    if (below(3) == 0) {
      CHECK(wheel.remove(slot) == plain.remove(slot));
    } else if (plain.pass_of.count(slot) == 0) {
      const std::int64_t pass = now + below(farthest);
      wheel.add(pass, slot);
      plain.add(pass, slot);
    }
    CHECK(wheel.next() <= plain.first());
    if (below(4) != 0) continue;
    now += below(5) == 0 ? below(farthest) : 1;
    while (wheel.next() < now) {
      const std::int64_t pass = wheel.next();
      wheel.take([&](std::int32_t ended) {
        CHECK(plain.pass_of.at(ended) == pass);
        plain.remove(ended);
      });
      CHECK(wheel.next() > pass);
    }
    CHECK(plain.first() >= now);
  }
  wheel.clear();
  CHECK(wheel.next() == EndWheel::kNever);
}

}  // namespace

int main() {
  for (const std::int64_t farthest : {2, 60, 1000, 1024, 1025, 5000, 40'000}) {
    for (unsigned seed = 0; seed < 5; ++seed) both_tell_the_same_ends(seed, farthest);
  }
  EndWheel wheel;
  wheel.clear();
  wheel.add(7, 3);
  wheel.add(7 + 1024, 4);  // the same place, a turn later
  CHECK(wheel.next() == 7);
  std::vector<std::int32_t> ended;
  wheel.take([&](std::int32_t slot) { ended.push_back(slot); });
  CHECK(ended == std::vector<std::int32_t>{3});
  CHECK(wheel.next() == 7 + 1024);
  CHECK(!wheel.remove(3));
  CHECK(wheel.remove(4));
  return testing::report("end_wheel");
}
