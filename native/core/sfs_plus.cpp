#include "sfs_plus.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace simcluster {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr std::size_t kRemembered = 200, kLeast = 20;  // residuals
constexpr double kKernel = 1e-3;          // [s] half width of what a residual stands for
constexpr double kLatencyWeight = 1e-3;   // [1/s] decides between equals
constexpr double kShortestWindow = 0.2;   // [s] of arrivals

double seconds(Picoseconds t) { return static_cast<double>(t) / kPicosecondsPerSecond; }

}  // namespace

SfsPlus::SfsPlus(const PriceOptions& options, std::vector<std::shared_ptr<InstanceView>> views,
                 std::vector<std::int32_t> kind_of_view)
    : options_(options), views_(std::move(views)), kind_of_view_(std::move(kind_of_view)) {
  const auto n = static_cast<std::int32_t>(views_.size());
  const bool in_range =
      std::all_of(kind_of_view_.begin(), kind_of_view_.end(), [&](auto k) { return k >= 0 && k < n; });
  if (views_.empty() || kind_of_view_.size() != views_.size() || !in_range) {
    throw std::invalid_argument("each view needs a kind, numbered from 0");
  }
  open_.resize(views_.size());
  count_kinds();
}

void SfsPlus::count_kinds() {
  num_kinds_ = static_cast<std::size_t>(*std::max_element(kind_of_view_.begin(), kind_of_view_.end())) + 1;
  residuals_.assign(num_kinds_, {});
  replicas_.assign(num_kinds_, 0);
  first_of_kind_.assign(num_kinds_, views_.size());
  for (std::size_t j = views_.size(); j-- > 0;) {
    replicas_[kind_of(j)] += 1;
    first_of_kind_[kind_of(j)] = j;
  }
}

// Whether a request is the same to all views of a kind, as it was said to be.
bool SfsPlus::kinds_hold(const Columns& columns) const {
  for (std::size_t j = 0; j < views_.size(); ++j) {
    const std::size_t first = first_of_kind_[kind_of(j)];
    if (columns.utility[j] != columns.utility[first] || columns.prompt_tokens[j] != columns.prompt_tokens[first]) {
      return false;
    }
  }
  return true;
}

void SfsPlus::Residuals::add(double residual) {
  order_.push_back(residual);
  sorted_.insert(std::upper_bound(sorted_.begin(), sorted_.end(), residual), residual);
  if (order_.size() <= kRemembered) return;
  sorted_.erase(std::lower_bound(sorted_.begin(), sorted_.end(), order_.front()));
  order_.pop_front();
}

double SfsPlus::Residuals::chance(double ttft_s, double target_s) const {
  if (ttft_s == kInf) return 0;
  if (target_s == kInf) return 1;
  if (sorted_.size() < kLeast) return ttft_s <= target_s ? 1 : 0;
  const double room = target_s - ttft_s;
  const auto from = std::upper_bound(sorted_.begin(), sorted_.end(), room - kKernel);
  double sum = static_cast<double>(from - sorted_.begin());
  for (auto it = from; it != sorted_.end() && *it < room + kKernel; ++it) sum += (room - *it) / (2 * kKernel) + 0.5;
  return sum / static_cast<double>(sorted_.size());
}

double SfsPlus::arrival_rate(double now_s) {
  arrivals_s_.push_back(now_s);
  while (arrivals_s_.front() < now_s - options_.rate_window_s) arrivals_s_.pop_front();
  const double window_s = std::clamp(now_s, kShortestWindow, std::max(options_.rate_window_s, kShortestWindow));
  return options_.routers * static_cast<double>(arrivals_s_.size()) / window_s;
}

void SfsPlus::remember(const Request& request, const Columns& columns) {
  Recent recent;
  for (std::size_t k = 0; k < num_kinds_; ++k) {
    const std::size_t j = first_of_kind_[k];
    if (j == views_.size()) continue;  // a number that no view has
    const LeastTime& least = views_[j]->least();
    const Picoseconds idle = columns.at[j] - request.now + least.batch + least.prompt(columns.prompt_tokens[j]);
    const double slack_s = request.target_s - seconds(idle + columns.hop[j]);
    if (slack_s >= 0 && columns.utility[j] > 0) recent.choices.push_back({k, columns.utility[j], slack_s});
  }
  std::stable_sort(recent.choices.begin(), recent.choices.end(),
                   [](const auto& a, const auto& b) { return a.utility > b.utility; });
  recent_.push_back(std::move(recent));
  if (static_cast<std::int64_t>(recent_.size()) > options_.sample) recent_.pop_front();
}

// The weight of the time up to s seconds from now; it falls linearly and adds up to the horizon.
double SfsPlus::weight_until(double s) const {
  const double horizon = options_.horizon_s;
  return s >= 2 * horizon ? horizon : s - s * s / (4 * horizon);
}

// What a request like this one loses, weighed over when it comes; one kind is clear at another time than now.
double SfsPlus::loss(const Recent& recent, std::size_t changed, double clear_s) const {
  if (recent.choices.empty()) return 0;
  const double best = recent.choices.front().utility;
  double until = options_.horizon_s, lost = 0;  // as weights
  for (const Recent::Choice& choice : recent.choices) {
    const double clear = choice.kind == changed ? clear_s : clear_s_[choice.kind];
    const double from = clear <= choice.slack_s ? 0 : weight_until(clear - choice.slack_s);
    if (from >= until) continue;
    lost += (best - choice.utility) * (until - from);
    until = from;
    if (until == 0) return lost;
  }
  return lost + best * until;
}

// What a second of all instances of this kind is worth to requests whose targets allow it: how much more it is to them than the best
// other kind, in proportion to their slack.
double SfsPlus::worth(std::size_t kind) const {
  double sum = 0;
  for (const Recent& recent : recent_) {
    double own = 0, other = 0, slack_s = 0;
    for (const Recent::Choice& choice : recent.choices) {
      if (choice.kind == kind) {
        own = choice.utility;
        slack_s = choice.slack_s;
      } else {
        other = std::max(other, choice.utility);
      }
    }
    sum += std::max(0.0, own - other) * std::min(1.0, slack_s / options_.horizon_s);
  }
  return sum / static_cast<double>(recent_.size());
}

// Whose first token comes when the instance is clear shares its batch with the newcomer and waits for it too. Anyone
// before that is done a whole batch earlier.
double SfsPlus::harm(std::size_t view, double before_s, double after_s) const {
  const Residuals& residuals = residuals_[kind_of(view)];
  const double together_s = before_s - seconds(views_[view]->least().batch);
  double sum = 0;
  for (const Open& open : open_[view]) {
    if (open.first_token_s < together_s || open.utility <= 0) continue;
    const double ttft_s = std::max(open.first_token_s, before_s) - open.arrival_s;
    sum += open.utility * (residuals.chance(ttft_s, open.target_s) -
                           residuals.chance(ttft_s + after_s - before_s, open.target_s));
  }
  return sum;
}

const std::vector<std::int32_t>& SfsPlus::decide(const Request& request, const Columns& columns) {
  const std::size_t n = views_.size();
  if (!kinds_hold(columns)) {  // then each view is a kind of its own, and learns anew
    std::iota(kind_of_view_.begin(), kind_of_view_.end(), 0);
    count_kinds();
    recent_.clear();
  }
  const auto allowed = [&](std::size_t j) { return columns.healthy.empty() || columns.healthy[j] != 0; };
  ttft_s_.assign(n, kInf);
  chance_.assign(n, 0);
  score_.assign(n, -kInf);
  before_s_.assign(n, 0);
  utility_.assign(columns.utility.begin(), columns.utility.end());
  clear_s_.assign(num_kinds_, kInf);
  next_clear_s_.assign(num_kinds_, kInf);
  const double rate = arrival_rate(seconds(request.now));
  remember(request, columns);

  // Without the request the instance is clear as much earlier as its prompt takes.
  const auto clear_before = [&](std::size_t j, double done_s) {
    return std::max(0.0, done_s - seconds(views_[j]->least().prompt(columns.prompt_tokens[j])));
  };
  const auto done = [&](std::size_t j) {
    return ttft_s_[j] - seconds(columns.hop[j] + request.now - request.arrival_time);
  };
  for (std::size_t j = 0; j < n; ++j) {
    const Picoseconds first = views_[j]->estimate_first_token({request.id, columns.prompt_tokens[j],
                                                               columns.predicted_output[j], request.max_tokens, false,
                                                               request.priority, request.arrival_time, columns.at[j]});
    if (first < kNever) ttft_s_[j] = seconds(first + columns.hop[j] - request.arrival_time);
    if (ttft_s_[j] == kInf || !allowed(j)) continue;
    const std::size_t k = kind_of(j);
    const double clear = clear_before(j, done(j));
    next_clear_s_[k] = std::min(next_clear_s_[k], std::max(clear, clear_s_[k]));
    clear_s_[k] = std::min(clear_s_[k], clear);
  }

  const auto count = static_cast<double>(recent_.size());
  double standing = 0;
  for (const Recent& recent : recent_) standing += loss(recent, num_kinds_, 0);
  std::vector<double> worth_of(num_kinds_, -1);
  double top = -kInf;
  for (std::size_t j = 0; j < n; ++j) {
    const std::size_t k = kind_of(j);
    chance_[j] = residuals_[k].chance(ttft_s_[j], request.target_s);
    if (ttft_s_[j] == kInf || !allowed(j)) continue;
    const double after = done(j), before = clear_before(j, after);
    double delay = 0;
    if (before <= clear_s_[k] && options_.price > 0) {  // others of its kind are clear no earlier
      const double clear = std::min(after, next_clear_s_[k]);
      double lost = 0;
      for (const Recent& recent : recent_) lost += loss(recent, k, clear);
      delay += options_.price * (lost - standing) / count;
    }
    if (options_.slack_price > 0) {
      if (worth_of[k] < 0) worth_of[k] = worth(k);
      delay += options_.slack_price * worth_of[k] * (after - before) / replicas_[k];
    }
    const double value = columns.utility[j] < 0 ? columns.utility[j] : chance_[j] * columns.utility[j];
    const double now_s = seconds(request.now + columns.hop[j]);
    before_s_[j] = now_s + before;
    score_[j] = value - harm(j, now_s + before, now_s + after) - rate * delay - kLatencyWeight * ttft_s_[j];
    top = std::max(top, score_[j]);
  }
  best_.clear();
  for (std::size_t j = 0; j < n; ++j) {
    if (score_[j] == top && allowed(j)) best_.push_back(static_cast<std::int32_t>(j));
  }
  last_ = {request.id, 0, seconds(request.arrival_time), request.target_s, 0, 0};
  return best_;
}

void SfsPlus::sent(std::int64_t id, std::int32_t instance) {
  const auto j = static_cast<std::size_t>(instance);
  if (id != last_.id || ttft_s_.at(j) == kInf) return;
  last_.utility = utility_[j];
  last_.expected_s = ttft_s_[j];
  last_.first_token_s = last_.arrival_s + ttft_s_[j];
  const double together_s = before_s_[j] - seconds(views_[j]->least().batch);
  for (Open& open : open_[j]) {
    if (open.first_token_s >= together_s) open.first_token_s = last_.first_token_s;
  }
  open_[j].push_back(last_);
  instance_of_[id] = instance;
}

std::vector<SfsPlus::Open>::iterator SfsPlus::find(std::int64_t id, std::vector<Open>& open) {
  return std::find_if(open.begin(), open.end(), [id](const Open& each) { return each.id == id; });
}

void SfsPlus::first_token(std::int64_t id, std::int32_t instance, double ttft_s) {
  std::vector<Open>& open = open_.at(static_cast<std::size_t>(instance));
  const auto it = find(id, open);
  if (it == open.end()) return;
  residuals_[kind_of(static_cast<std::size_t>(instance))].add(ttft_s - it->expected_s);
  open.erase(it);
  instance_of_.erase(id);
}

void SfsPlus::forget(std::int64_t id) {
  const auto known = instance_of_.find(id);
  if (known == instance_of_.end()) return;
  std::vector<Open>& open = open_[static_cast<std::size_t>(known->second)];
  open.erase(find(id, open));
  instance_of_.erase(known);
}

}  // namespace simcluster
