#include <limits>
#include <memory>
#include <stdexcept>
#include <utility>
#include <vector>

#include "check.hpp"
#include "step_time.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

// 6 prefill tokens after 4, and decodes after 30 and 50 tokens: n = 8, S_dec = 80, A_pre = 24 + 21.
StepFeatures mixed() {
  StepFeatures f;
  f.add(4, 6, false);
  f.add(30, 1, true);
  f.add(50, 1, true);
  return f;
}

void features_are_sums_over_the_batch() {
  const StepFeatures f = mixed();
  CHECK(f.num_tokens == 8 && f.num_decodes == 2 && f.num_prefills == 1);
  CHECK(f.sum_decode_context == 80 && f.prefill_attention == 45);
}

void every_term_counts_by_itself() {
  const StepFeatures f = mixed();
  const auto time = [&f](Picoseconds StepTimeModel::* coefficient) {
    StepTimeModel model;
    model.*coefficient = 1000;
    return model.device_time(f);
  };
  CHECK(time(&StepTimeModel::b0) == 1000);
  CHECK(time(&StepTimeModel::b1) == 8000);
  CHECK(time(&StepTimeModel::b1x) == 8000);
  CHECK(time(&StepTimeModel::b2) == 80'000);
  CHECK(time(&StepTimeModel::b3) == 45'000);
  CHECK(time(&StepTimeModel::b4) == 80'000);
  CHECK(time(&StepTimeModel::b5) == 1000);
  CHECK(time(&StepTimeModel::host) == 0);
}

void some_terms_count_only_where_they_apply() {
  StepTimeModel model;
  model.b1x = 1000;
  for (const auto& [hinge, expected] : {std::pair{0, 8000}, {5, 3000}, {8, 0}, {9, 0}}) {
    model.hinge_tokens = hinge;
    CHECK(model.device_time(mixed()) == expected);
  }
  StepFeatures decodes;
  decodes.add(30, 1, true);
  StepTimeModel beside_prefills;
  beside_prefills.b4 = 1000;
  beside_prefills.b5 = 1000;
  CHECK(beside_prefills.device_time(decodes) == 0);
}

void a_chunked_prefill_has_the_attention_of_a_whole_one() {
  StepFeatures whole, chunks;
  whole.add(0, 8, false);
  chunks.add(0, 3, false);
  chunks.add(3, 5, false);
  CHECK(whole.prefill_attention == 36 && chunks.prefill_attention == 36);
}

void a_duration_beyond_the_clock_is_an_error() {
  StepFeatures f;
  f.add(1'000'000, 1'000'000, false);
  StepTimeModel model;
  model.b3 = 1'000'000'000'000;
  CHECK(throws<std::overflow_error>([&] { model.device_time(f); }));
  StepTimeModel wide;
  wide.b2 = wide.b4 = std::numeric_limits<Picoseconds>::max();
  CHECK(throws<std::overflow_error>([&] { wide.device_time(mixed()); }));
  StepTimeModel edge;
  edge.b0 = kNever - 1;
  CHECK(edge.device_time({}) == kNever - 1);
  edge.b0 = kNever;
  CHECK(throws<std::overflow_error>([&] { edge.device_time({}); }));
  edge.b0 = -1;
  CHECK(throws<std::overflow_error>([&] { edge.device_time({}); }));
}

void host_time_adds_to_a_synchronous_period_only() {
  StepTimeModel model;
  model.host = 30;
  CHECK(model.period(100, false) == 130);
  CHECK(model.period(100, true) == 100);
  CHECK(model.period(10, true) == 30);
}

void noise_is_a_pure_function_of_seed_instance_and_step() {
  const auto factors = std::make_shared<const std::vector<std::int64_t>>(
      std::vector<std::int64_t>{std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{3} << 32});
  const StepNoise noise{factors, 7, 1};
  int drawn[3] = {0, 0, 0};
  for (std::int64_t step = 0; step < 3000; ++step) {
    const Picoseconds t = noise.apply(1000, step);
    CHECK(t == 500 || t == 1000 || t == 3000);
    CHECK((t == StepNoise{factors, 7, 1}.apply(1000, step)));
    ++drawn[t == 500 ? 0 : t == 1000 ? 1 : 2];
  }
  for (const int count : drawn) CHECK(count > 900 && count < 1100);
  CHECK(StepNoise{}.apply(1000, 5) == 1000);
}

void a_recorded_step_takes_what_was_recorded_and_later_ones_what_the_model_says() {
  const auto durations = std::make_shared<const std::vector<std::int64_t>>(std::vector<std::int64_t>{700, 50});
  const StepNoise recorded{durations, 0, 0, true};
  CHECK(recorded.apply(1000, 0) == 700);
  CHECK(recorded.apply(1000, 1) == 50);
  CHECK(recorded.apply(1000, 2) == 1000);
}

}  // namespace

int main() {
  features_are_sums_over_the_batch();
  every_term_counts_by_itself();
  some_terms_count_only_where_they_apply();
  a_chunked_prefill_has_the_attention_of_a_whole_one();
  a_duration_beyond_the_clock_is_an_error();
  host_time_adds_to_a_synchronous_period_only();
  noise_is_a_pure_function_of_seed_instance_and_step();
  a_recorded_step_takes_what_was_recorded_and_later_ones_what_the_model_says();
  return report("step time");
}
