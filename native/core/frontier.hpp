// An engine run ahead to where a newcomer would be looked at first, so that an estimate is one evaluation of the step
// time. Under FCFS nobody ahead of the tail of the queue can see a newcomer, so its past is the past without it.
#pragma once

#include <cstdint>

#include "engine.hpp"

namespace simcluster {

// Durations that hold whatever else is in a batch; zero where a coefficient is negative, since nothing is known then.
struct LeastTime {
  LeastTime() = default;
  LeastTime(const StepTimeModel& model, const SchedulerConfig& config);

  // What holds by either.
  LeastTime operator&(const LeastTime& other) const;
  // Of a whole prompt beyond `batch`, in whichever chunks: their attention adds up to that of one, and there is a
  // batch for each budget full of tokens. What the hinge adds is left out.
  Picoseconds prompt(std::int64_t tokens) const;
  // What the hinge adds to a prompt in a batch without other tokens, or takes from one that does not reach it: less
  // than that is not added beside others, nor to chunks, since another batch takes longer than all tokens before it.
  Picoseconds past_hinge(std::int64_t tokens) const;
  // What the first of a prompt's tokens add to a batch with these features, as far as another batch would, too.
  Picoseconds by_context(const StepTimeModel& model, const StepFeatures& features) const;
  Picoseconds by_tokens(const StepFeatures& features) const { return beyond * std::min(features.num_tokens, hinge); }

  bool known = false;
  Picoseconds batch = 0;                      // of any batch that computes a token
  Picoseconds token = 0, pair = 0, prefill = 0;  // b1, b3, b5
  Picoseconds beyond = 0;                        // b1x, or less, so that beyond * hinge <= batch
  std::int64_t hinge = 0;                        // tokens
  bool one_hinge = true;                         // the last two are those of everybody
  std::int64_t budget = 1;                       // tokens of a batch
};

// What a prompt computed in whole adds to the time of a batch.
struct PromptTime {
  PromptTime() = default;
  PromptTime(const StepTimeModel& model, std::int64_t prompt_tokens);

  // Beside tokens of which so many are before the hinge.
  __int128 beside(std::int64_t before_hinge) const {
    return alone + static_cast<__int128>(per_token_beyond) * std::max<std::int64_t>(tokens_beyond + before_hinge, 0);
  }

  std::int64_t tokens = 0;
  Picoseconds alone = 0;             // b1, b3 and b5
  Picoseconds per_token_beyond = 0;  // b1x
  std::int64_t tokens_beyond = 0;    // the prompt less the hinge
};

// What is known of the first tokens of requests that would arrive now.
struct Outlook {
  Picoseconds earliest = 0;        // it holds for arrivals from here on,
  Picoseconds until = kNever;      // exactly and with `at_least` up to here, with `at_least_later` behind that
  Picoseconds start = 0;           // of the batch they join, or their arrival
  std::int64_t longest = 0;        // prompt that this batch takes in whole
  Picoseconds device = 0;          // time of the batch on the device without them, but as one with a prefill
  std::int64_t before_hinge = 0;   // tokens in it, up to the hinge
  Picoseconds at_least = 0;        // bounds from below, LeastTime::prompt() left out
  Picoseconds at_least_hinged = 0;  // the same with LeastTime::past_hinge() left out, too; not below the other
  Picoseconds at_least_later = 0;   // for either behind `until`; not below the first

  // Where a pass has this room and nobody arrived since `from`.
  static Outlook of(const Room& room, Picoseconds from, const StepTimeModel& model, const SchedulerConfig& config,
                    const LeastTime& least);

  bool tells(std::int64_t prompt_tokens, Picoseconds at) const {
    return prompt_tokens <= longest && at <= until && at >= earliest;
  }
  // Equal to adding up the batch anew.
  Picoseconds first_token(const StepTimeModel& model, bool async, const PromptTime& prompt, Picoseconds at) const {
    return std::max(start, at) + model.period(StepTimeModel::checked(device + prompt.beside(before_hinge)), async);
  }
};

class Frontier {
 public:
  explicit Frontier(const Engine& blank) : engine_(blank), least_(blank.step_time(), config()) {}

  // Whether newcomers cannot change what happens before they are looked at.
  bool exact() const { return engine_.stops_in_passes(); }

  // To be set to a state; then start() is due.
  Engine& engine() { return engine_; }
  void start();

  // Go to the pass that a request arriving at `at` meets first. False: it arrived before that or would overtake
  // others, or the engine makes no progress, so only a whole simulation can tell.
  bool reach(Picoseconds at) { return is_at(at) || move_on(at); }
  // When its first token comes if it is not computed in whole in that pass: run on with the request, on a copy or on the frontier itself, which is then of no more use.
  Picoseconds run_on(const Submission& candidate, Engine& copy) const;
  Picoseconds run_out(const Submission& candidate) { return run_with(engine_, candidate); }

  // One more request that the engine will get. False: it comes too late to be added, the frontier is of no more use.
  bool add(const Submission& submission);

  const Outlook& outlook() const { return outlook_; }

 private:
  const SchedulerConfig& config() const { return engine_.scheduler().config(); }
  bool is_at(Picoseconds at) const { return at <= room_.until && at >= from_ && room_.open(); }
  bool move_on(Picoseconds at);
  void look();
  Picoseconds run_with(Engine& engine, const Submission& candidate) const;

  Room room_;
  Picoseconds from_ = 0;   // requests that arrive earlier may belong before this
  Outlook outlook_;
  bool lost_ = false;      // no progress
  Engine engine_;
  LeastTime least_;
};

}  // namespace simcluster
