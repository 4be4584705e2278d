// Which instance gets a request when its delay has a price: the chance to be on time, learned from what estimates got
// wrong, and what the instance's time is worth to those who come next.
//
// An instance is clear once every prefill it has now is done. A request that goes there makes it clear later, and
// whoever comes until then waits. Who that will be is taken from the last requests: had they come s seconds from now,
// the best instance still in time for them is worth so much less than the best one of an idle cluster.
#pragma once

#include <cstdint>
#include <deque>
#include <memory>
#include <span>
#include <unordered_map>
#include <vector>

#include "view.hpp"

namespace simcluster {

struct PriceOptions {
  double price = 1.5;        // weight of what later requests lose by missing their targets
  double slack_price = 2;    // weight of delay that their targets still allow
  double horizon_s = 1;      // mean of the time looked ahead
  double rate_window_s = 5;  // arrivals are counted over
  double routers = 1;        // that send as much as this one
  std::int64_t sample = 64;  // last requests that stand for the next ones
};

class SfsPlus {
 public:
  // Views of one kind are equal to a request but for their load; should they turn out not to be, each is a kind of its
  // own from then on. Throws std::invalid_argument unless there is a kind,
  // from 0, for each view.
  SfsPlus(const PriceOptions& options, std::vector<std::shared_ptr<InstanceView>> views,
          std::vector<std::int32_t> kind_of_view);

  struct Request {
    std::int64_t id = -1;
    std::int64_t max_tokens = -1;
    std::int64_t priority = 0;
    Picoseconds arrival_time = 0, now = 0;
    double target_s = 0;  // inf: none
  };
  // What the request is to each view; columns (n,). healthy (n,): who may be chosen, empty: all.
  struct Columns {
    std::span<const double> utility;
    std::span<const std::int64_t> prompt_tokens, predicted_output, at, hop;
    std::span<const std::uint8_t> healthy;
  };

  // Estimates the request everywhere and scores it; the instances of the largest score, ascending.
  const std::vector<std::int32_t>& decide(const Request& request, const Columns& columns);
  // Of the last decision (n,): TTFT [s], inf where it cannot be served; chance to be on time; score.
  const std::vector<double>& ttft_s() const { return ttft_s_; }
  const std::vector<double>& chance() const { return chance_; }
  const std::vector<double>& score() const { return score_; }
  std::size_t size() const { return views_.size(); }

  // The request of the last decision was sent to an instance.
  void sent(std::int64_t id, std::int32_t instance);
  void first_token(std::int64_t id, std::int32_t instance, double ttft_s);
  void forget(std::int64_t id);

 private:
  // The last residuals (observed - predicted TTFT) of the instances of one kind.
  class Residuals {
   public:
    void add(double residual);
    double chance(double ttft_s, double target_s) const;

   private:
    std::deque<double> order_;
    std::vector<double> sorted_;
  };
  // One of the last requests: what the kinds that could serve it in time when idle are worth, best first.
  struct Recent {
    struct Choice {
      std::size_t kind = 0;
      double utility = 0;
      double slack_s = 0;  // how late the instance may be clear
    };
    std::vector<Choice> choices;
  };

  // A request sent and without a first token.
  struct Open {
    std::int64_t id = -1;
    double utility = 0;
    double arrival_s = 0, target_s = 0;
    double expected_s = 0;      // TTFT when it was sent, for the residual
    double first_token_s = 0;   // the instant at which its first token is expected, requests sent later considered
  };

  std::size_t kind_of(std::size_t view) const { return static_cast<std::size_t>(kind_of_view_[view]); }
  void count_kinds();
  bool kinds_hold(const Columns& columns) const;
  double arrival_rate(double now_s);
  void remember(const Request& request, const Columns& columns);
  double weight_until(double s) const;
  double loss(const Recent& recent, std::size_t changed, double clear_s) const;
  double worth(std::size_t kind) const;
  double harm(std::size_t view, double before_s, double after_s) const;
  std::vector<Open>::iterator find(std::int64_t id, std::vector<Open>& open);

  PriceOptions options_;
  std::vector<std::shared_ptr<InstanceView>> views_;
  std::vector<std::int32_t> kind_of_view_;
  std::size_t num_kinds_ = 0;
  std::vector<double> replicas_;            // (kinds,)
  std::vector<std::size_t> first_of_kind_;  // (kinds,)
  std::vector<Residuals> residuals_;  // (kinds,)
  std::deque<Recent> recent_;
  std::deque<double> arrivals_s_;
  std::vector<std::vector<Open>> open_;  // (n,)
  std::unordered_map<std::int64_t, std::int32_t> instance_of_;  // of requests without a first token

  Open last_;  // the request of the last decision
  std::vector<double> utility_, before_s_;  // (n,) of the last decision: instants at which instances are clear without it
  std::vector<double> ttft_s_, chance_, score_;  // (n,)
  std::vector<double> clear_s_, next_clear_s_;  // (kinds,) from now: the earliest clear instance, and the one after it
  std::vector<std::int32_t> best_;
};

}  // namespace simcluster
