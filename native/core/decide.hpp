// Which instance gets a request: eq. 3 or eq. 5 over all views of one router. Only those that can still win are
// estimated; the others are skipped by what their frontiers say at least. Source: paper eqs. 3, 5.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>
#include <memory>
#include <span>
#include <vector>

#include "view.hpp"

namespace simcluster {

enum class Objective : std::uint8_t { slo, weighted };
enum class Explain : std::uint8_t { choice, runner_up, all };  // who is estimated beside the winners
enum class Because : std::uint8_t { feasible, infeasible, score };

// What a request is to all instances of one kind.
struct Offer {
  double utility = 0;
  std::int64_t prompt_tokens = 0;
  std::int64_t predicted_output = 1;
  Picoseconds at = 0;   // reaches the engine
  Picoseconds hop = 0;  // from the engine to the client

  bool operator==(const Offer&) const = default;
};

struct Query {
  std::int64_t id = -1;
  std::int64_t max_tokens = -1;
  bool ends_by_length = false;
  std::int64_t priority = 0;
  Picoseconds arrival_time = 0;
  Objective objective = Objective::slo;
  double target_s = std::numeric_limits<double>::infinity();
  double latency_weight = 0;  // [1/s]
  Explain explain = Explain::runner_up;
};

struct Choice {
  Because because = Because::feasible;
  bool none_healthy = false;
  std::vector<std::int32_t> best;  // equally good, ascending; which of them is the tie rule's matter
};

class Fleet final : public ViewWatcher {
 public:
  // Views of one kind get equal offers. Throws std::invalid_argument unless there is a kind, from 0, for each view.
  Fleet(std::vector<std::shared_ptr<InstanceView>> views, std::vector<std::int32_t> kind_of_view);
  ~Fleet();
  Fleet(const Fleet&) = delete;
  Fleet& operator=(const Fleet&) = delete;

  std::size_t size() const { return views_.size(); }
  std::size_t num_kinds() const { return kinds_.size(); }
  const std::vector<std::int32_t>& kind_of_view() const { return kind_of_view_; }
  void regroup(std::vector<std::int32_t> kind_of_view);

  // offers (kinds,); healthy (n,) tells who may be chosen, empty or none: all. Throws std::invalid_argument for a
  // number that is not one, or a weight below 0.
  const Choice& decide(const Query& query, std::span<const Offer> offers, std::span<const std::uint8_t> healthy = {});

  // Of the last decision (n,): the TTFT [s], inf where the instance cannot serve the request, nan where none was
  // estimated; and what was maximised, -inf for those who could not be chosen or were skipped.
  const std::vector<double>& ttft_s() const { return ttft_s_; }
  std::vector<double> score() const;
  const std::vector<std::int32_t>& estimated() const { return estimated_; }

  void changed(std::int32_t index) override;

 private:
  // What bounds the views below a node, by itself and where the hinge counts.
  struct Floor {
    Picoseconds plain = kNever, hinged = kNever;  // kNever: no view there

    bool operator==(const Floor&) const = default;
  };
  // The bounds of its views in a tree of minima: leaves from `width` on, root at 1.
  struct Kind {
    std::vector<std::int32_t> members;  // ascending
    std::vector<Floor> floors;
    std::vector<Outlook> outlooks;      // (members,)
    std::size_t width = 1;
    LeastTime least_time;
    StepTimeModel model;               // of every member, as are the next two, if `alike`
    bool async = false;
    std::int64_t max_model_len = 0;
    bool alike = true;
    Picoseconds earliest = 0;     // arrivals before this are not bound by floors
    // For the offer:
    bool readable = false;      // an outlook can tell without its view
    bool bound = false;         // the floors hold
    PromptTime prompt;
    Picoseconds least = 0;      // bound for any view, without what is to be added to a floor
    Picoseconds own = 0, own_hinged = 0;

    void add(std::int32_t index, const InstanceView& view);
    void place(std::size_t member, const Outlook& outlook);
    bool forget(std::size_t member, Picoseconds at);
  };
  // The two best values so far.
  struct TwoBest {
    double first = -std::numeric_limits<double>::infinity(), second = first;

    void add(double value) {
      second = std::max(second, std::min(first, value));
      first = std::max(first, value);
    }
    // What a view must reach to matter.
    double needed(Explain explain) const { return explain == Explain::choice ? first : second; }
  };

  void check(const Query& query, std::span<const Offer> offers, std::span<const std::uint8_t> healthy) const;
  void begin(const Query& query, std::span<const Offer> offers, std::span<const std::uint8_t> healthy);
  void update(std::int32_t index);
  bool allowed(std::int32_t i) const { return healthy_.empty() || healthy_[static_cast<std::size_t>(i)] != 0; }
  bool feasible(std::int32_t i) const;
  double known(std::int32_t i) const { return ttft_s_[static_cast<std::size_t>(i)]; }
  const Offer& offer_of(std::int32_t i) const {
    return offers_[static_cast<std::size_t>(kind_of_view_[static_cast<std::size_t>(i)])];
  }
  Picoseconds ask(std::int32_t index);
  void estimate_all();
  double seconds(Picoseconds first, const Offer& offer) const;
  double weighted(double utility, double ttft_s) const;
  double estimate(std::int32_t index);
  Picoseconds bound(const Kind& kind, std::size_t node) const;
  double at_least(std::size_t kind, std::size_t node) const;  // TTFT [s] of every view below a node
  // Call visit(index) for the views of a kind that may be chosen and whose least TTFT is possible(), in about the
  // order of the least TTFT.
  template <typename Possible, typename Visit>
  void descend(std::size_t kind, const Possible& possible, const Visit& visit);
  template <typename Possible, typename Visit>
  void descend_below(std::size_t kind, std::size_t node, const Possible& possible, const Visit& visit);

  bool behind(std::int32_t a, std::int32_t b) const {
    const double x = value_[static_cast<std::size_t>(a)], y = value_[static_cast<std::size_t>(b)];
    return x != y ? x < y : a > b;
  }
  void order_kinds();
  std::int32_t next_kind();
  void decide_slo();
  void decide_infeasible();
  void decide_weighted();
  bool best_of_level();
  std::int64_t find_feasible(std::int64_t wanted);
  std::int64_t count_feasible(const std::vector<std::int32_t>& members, std::int64_t wanted);
  template <typename Value>
  void keep_best(const Value& value);

  std::vector<std::shared_ptr<InstanceView>> views_;
  std::vector<std::int32_t> kind_of_view_, place_of_view_;
  std::vector<Kind> kinds_;
  std::vector<std::int32_t> changed_;  // views whose floors are out of date
  std::vector<std::uint8_t> is_changed_;

  Query query_;
  std::vector<Offer> offers_;
  std::vector<std::uint8_t> healthy_;  // empty: all may be chosen
  Choice choice_;
  std::vector<double> ttft_s_;
  std::vector<std::int32_t> estimated_;
  std::vector<double> value_;           // of the kinds, what they are visited by
  std::vector<std::int32_t> heap_, level_, members_;  // scratch: kinds still to visit, those of one utility
};

}  // namespace simcluster
