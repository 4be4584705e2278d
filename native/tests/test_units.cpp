#include <limits>
#include <stdexcept>

#include "check.hpp"
#include "units.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

void seconds_become_the_nearest_picosecond() {
  CHECK(picoseconds_from_seconds(0.0) == 0);
  CHECK(picoseconds_from_seconds(1.0) == 1'000'000'000'000);
  CHECK(picoseconds_from_seconds(0.0123) == 12'300'000'000);
  CHECK(picoseconds_from_seconds(1.4e-12) == 1);
  CHECK(picoseconds_from_seconds(1.6e-12) == 2);
  CHECK(picoseconds_from_seconds(-1.6e-12) == -2);
}

void times_beyond_the_clock_are_refused() {
  for (const double seconds : {1e30, -1e30, static_cast<double>(kNever) / kPicosecondsPerSecond,
                               std::numeric_limits<double>::infinity(),
                               std::numeric_limits<double>::quiet_NaN()}) {
    CHECK(throws<std::invalid_argument>([&] { picoseconds_from_seconds(seconds); }));
  }
  CHECK(picoseconds_from_seconds(2'000'000.0) < kNever);
}

}  // namespace

int main() {
  seconds_become_the_nearest_picosecond();
  times_beyond_the_clock_are_refused();
  return report("units");
}
