// Time in the core: whole picoseconds.
#pragma once

#include <cstdint>
#include <limits>

namespace simcluster {

using Picoseconds = std::int64_t;

// A time later than every event; leaves room to add a duration without overflow.
inline constexpr Picoseconds kNever = std::numeric_limits<Picoseconds>::max() / 4;

inline constexpr double kPicosecondsPerSecond = 1e12;

// The one rounding from seconds. Throws std::invalid_argument when the value is not finite or beyond the clock.
Picoseconds picoseconds_from_seconds(double seconds);

}  // namespace simcluster
