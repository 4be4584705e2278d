#include "units.hpp"

#include <cmath>
#include <stdexcept>

namespace simcluster {

Picoseconds picoseconds_from_seconds(double seconds) {
  const double value = std::nearbyint(seconds * kPicosecondsPerSecond);
  if (!std::isfinite(value) || std::fabs(value) >= static_cast<double>(kNever)) {
    throw std::invalid_argument("a time in seconds is not finite or beyond the range of the clock");
  }
  return static_cast<Picoseconds>(value);
}

}  // namespace simcluster
