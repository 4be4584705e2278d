// How long one batch takes. Source: paper eq. 9 and the optional terms measurements ask for.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "request_state.hpp"
#include "units.hpp"

namespace simcluster {

// T = b0 + b1*n + b1x*max(n - T0, 0) + b2*S_dec + b3*A_pre + b4*S_dec*[has a prefill] + b5*(prefills), whole
// picoseconds, so that sums have no rounding and equal inputs give equal times.
struct StepTimeModel {
  using Wide = __int128;

  Picoseconds b0 = 0;   // per batch
  Picoseconds b1 = 0;   // per token
  Picoseconds b1x = 0;  // per token beyond hinge_tokens
  Picoseconds b2 = 0;   // per token of decode context
  Picoseconds b3 = 0;   // per token pair of prefill attention
  Picoseconds b4 = 0;   // per token of decode context in a batch with a prefill
  Picoseconds b5 = 0;   // per prefilling request
  std::int64_t hinge_tokens = 0;
  Picoseconds host = 0;  // scheduling, sampling and processing, per step

  // Time of the accelerator. Throws std::overflow_error beyond the clock.
  Picoseconds device_time(const StepFeatures& f) const {
    Picoseconds t = b0;  // 64 bits, and more only where they do not suffice
    bool fits = add_term(t, b1, f.num_tokens) && add_term(t, b2, f.sum_decode_context);
    if (f.num_tokens > hinge_tokens) fits = fits && add_term(t, b1x, f.num_tokens - hinge_tokens);
    if (f.num_prefills > 0) {
      fits = fits && add_term(t, b3, f.prefill_attention) && add_term(t, b4, f.sum_decode_context) &&
             add_term(t, b5, f.num_prefills);
    }
    return fits && t >= 0 && t < kNever ? t : wide_device_time(f);
  }
  bool operator==(const StepTimeModel&) const = default;
  // One period of the loop: T + host (synchronous) or max(T, host) (asynchronous); an empty batch takes 0.
  Picoseconds period(Picoseconds device, bool async) const {
    return async ? std::max(device, host) : device + host;
  }
  static Picoseconds checked(Wide value) {
    if (value < 0 || value >= kNever) fail_overflow();
    return static_cast<Picoseconds>(value);
  }

 private:
  [[noreturn]] static void fail_overflow();
  static bool add_term(Picoseconds& sum, Picoseconds each, std::int64_t count) {
    Picoseconds term = 0;
    return !__builtin_mul_overflow(each, count, &term) && !__builtin_add_overflow(sum, term, &sum);
  }
  [[gnu::noinline]] Picoseconds wide_device_time(const StepFeatures& f) const;
};

// Multiplicative noise per step: a pure hash of (seed, instance, step) picks a row of a table of factors in 2^-32.
// Or the table says how long each step was: what a real engine was recorded to take. Steps beyond it take the model's.
class StepNoise {
 public:
  std::shared_ptr<const std::vector<std::int64_t>> factors;  // null or empty: no noise
  std::uint64_t seed = 0;
  std::uint64_t instance = 0;
  bool recorded = false;  // the table has a duration [ps] for each step, not factors

  Picoseconds apply(Picoseconds device, std::int64_t step) const {
    return factors && !factors->empty() ? scaled(device, step) : device;
  }

 private:
  Picoseconds scaled(Picoseconds device, std::int64_t step) const;
};

}  // namespace simcluster
