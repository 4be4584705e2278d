#include "decide.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <numeric>
#include <stdexcept>

namespace simcluster {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();

}  // namespace

Fleet::Fleet(std::vector<std::shared_ptr<InstanceView>> views, std::vector<std::int32_t> kind_of_view)
    : views_(std::move(views)),
      is_changed_(views_.size(), 0),
      ttft_s_(views_.size(), std::numeric_limits<double>::quiet_NaN()) {
  regroup(std::move(kind_of_view));
  for (std::size_t i = 0; i < views_.size(); ++i) views_[i]->watch(this, static_cast<std::int32_t>(i));
}

Fleet::~Fleet() {
  for (const auto& view : views_) view->unwatch(this);
}

void Fleet::regroup(std::vector<std::int32_t> kind_of_view) {
  const auto n = static_cast<std::int32_t>(views_.size());
  const bool in_range = std::all_of(kind_of_view.begin(), kind_of_view.end(), [&](auto k) { return k >= 0 && k < n; });
  if (kind_of_view.size() != views_.size() || !in_range) {
    throw std::invalid_argument("each view needs a kind, numbered from 0");
  }
  kind_of_view_ = std::move(kind_of_view);
  place_of_view_.assign(views_.size(), 0);
  kinds_.clear();
  for (std::int32_t i = 0; i < n; ++i) {
    const auto k = static_cast<std::size_t>(kind_of_view_[static_cast<std::size_t>(i)]);
    if (k >= kinds_.size()) kinds_.resize(k + 1);
    Kind& kind = kinds_[k];
    place_of_view_[static_cast<std::size_t>(i)] = static_cast<std::int32_t>(kind.members.size());
    kind.add(i, *views_[static_cast<std::size_t>(i)]);
  }
  value_.assign(kinds_.size(), 0);
  for (Kind& kind : kinds_) {
    kind.width = std::bit_ceil(std::max<std::size_t>(kind.members.size(), 1));
    kind.floors.assign(2 * kind.width, Floor{});
    kind.outlooks.resize(kind.members.size());
  }
  for (std::int32_t i = 0; i < n; ++i) update(i);
}

void Fleet::changed(std::int32_t index) {
  std::uint8_t& flag = is_changed_[static_cast<std::size_t>(index)];
  if (flag == 0) changed_.push_back(index);
  flag = 1;
}

void Fleet::update(std::int32_t index) {
  const auto i = static_cast<std::size_t>(index);
  Kind& kind = kinds_[static_cast<std::size_t>(kind_of_view_[i])];
  kind.place(static_cast<std::size_t>(place_of_view_[i]), views_[i]->outlook());
}

void Fleet::Kind::add(std::int32_t index, const InstanceView& view) {
  if (members.empty()) {
    least_time = view.least();
    model = view.believed();
    async = view.config().async_scheduling;
    max_model_len = view.config().max_model_len;
  }
  least_time = least_time & view.least();
  alike = alike && model == view.believed() && async == view.config().async_scheduling &&
          max_model_len == view.config().max_model_len;
  members.push_back(index);
}

void Fleet::Kind::place(std::size_t member, const Outlook& outlook) {
  earliest = std::max(earliest, outlook.earliest);
  outlooks[member] = outlook;
  std::size_t node = width + member;
  floors[node] = {std::min(outlook.at_least, kNever - 1), std::min(outlook.at_least_hinged, kNever - 1)};
  while (node > 1) {
    node /= 2;
    const Floor &left = floors[2 * node], &right = floors[2 * node + 1];
    const Floor smaller{std::min(left.plain, right.plain), std::min(left.hinged, right.hinged)};
    if (floors[node] == smaller) break;
    floors[node] = smaller;
  }
}

// Requests come in order of time, so what holds for earlier arrivals can be forgotten.
bool Fleet::Kind::forget(std::size_t member, Picoseconds at) {
  Outlook outlook = outlooks[member];
  if (at <= outlook.until) return false;
  outlook.earliest = std::max(outlook.earliest, outlook.until + 1);
  outlook.until = kNever;
  outlook.longest = 0;
  outlook.at_least = outlook.at_least_hinged = outlook.at_least_later;
  place(member, outlook);
  return true;
}

void Fleet::check(const Query& query, std::span<const Offer> offers, std::span<const std::uint8_t> healthy) const {
  if (views_.empty()) throw std::invalid_argument("a decision needs a view");
  if (offers.size() != kinds_.size()) throw std::invalid_argument("each kind of view needs an offer");
  if (!healthy.empty() && healthy.size() != views_.size()) {
    throw std::invalid_argument("each view is healthy or not");
  }
  const bool numbers = std::none_of(offers.begin(), offers.end(), [](const Offer& o) { return std::isnan(o.utility); });
  if (!numbers || std::isnan(query.target_s) || !(query.latency_weight >= 0)) {
    throw std::invalid_argument("a utility or target is not a number, or the latency weight is not at least 0");
  }
}

void Fleet::begin(const Query& query, std::span<const Offer> offers, std::span<const std::uint8_t> healthy) {
  for (const std::int32_t i : changed_) {
    is_changed_[static_cast<std::size_t>(i)] = 0;
    update(i);
  }
  changed_.clear();
  for (const std::int32_t i : estimated_) ttft_s_[static_cast<std::size_t>(i)] = std::nan("");
  estimated_.clear();
  query_ = query;
  offers_.assign(offers.begin(), offers.end());
  healthy_.assign(healthy.begin(), healthy.end());
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    Kind& kind = kinds_[k];
    kind.readable = kind.alike && offers_[k].prompt_tokens > 0 && offers_[k].predicted_output > 0 &&
                    query.max_tokens <= kind.max_model_len;
    if (kind.readable) kind.prompt = {kind.model, offers_[k].prompt_tokens};
    kind.bound = offers_[k].at >= kind.earliest;
    kind.least = offers_[k].at;
    kind.own = 0;
    kind.own_hinged = -kNever;
    if (!kind.least_time.known) continue;
    kind.least += kind.least_time.batch;
    kind.own = kind.least_time.prompt(offers_[k].prompt_tokens);
    kind.own_hinged = kind.own + kind.least_time.past_hinge(offers_[k].prompt_tokens);
  }
  choice_.best.clear();
  const auto ill = [](std::uint8_t ok) { return ok == 0; };
  choice_.none_healthy = !healthy_.empty() && std::all_of(healthy_.begin(), healthy_.end(), ill);
  if (choice_.none_healthy) healthy_.clear();
}

double Fleet::seconds(Picoseconds first, const Offer& offer) const {
  if (first >= kNever) return kInf;
  return static_cast<double>(first + offer.hop - query_.arrival_time) / kPicosecondsPerSecond;
}

Picoseconds Fleet::bound(const Kind& kind, std::size_t node) const {
  const Floor floor = kind.bound ? kind.floors[node] : Floor{kind.least, kind.least};
  return std::max(std::max(kind.least, floor.plain) + kind.own, std::max(kind.least, floor.hinged) + kind.own_hinged);
}

double Fleet::at_least(std::size_t k, std::size_t node) const { return seconds(bound(kinds_[k], node), offers_[k]); }

double Fleet::estimate(std::int32_t index) {
  const auto i = static_cast<std::size_t>(index);
  if (!std::isnan(ttft_s_[i])) return ttft_s_[i];
  const Offer& offer = offer_of(index);
  const Kind& kind = kinds_[static_cast<std::size_t>(kind_of_view_[i])];
  const Outlook& outlook = kind.outlooks[static_cast<std::size_t>(place_of_view_[i])];
  const bool told = kind.readable && outlook.tells(offer.prompt_tokens, offer.at);
  const Picoseconds first = told ? outlook.first_token(kind.model, kind.async, kind.prompt, offer.at) : ask(index);
  estimated_.push_back(index);
  return ttft_s_[i] = seconds(first, offer);
}

Picoseconds Fleet::ask(std::int32_t index) {
  const Offer& offer = offer_of(index);
  return views_[static_cast<std::size_t>(index)]->estimate_first_token(
      {query_.id, offer.prompt_tokens, offer.predicted_output, query_.max_tokens, query_.ends_by_length,
       query_.priority, query_.arrival_time, offer.at});
}

void Fleet::estimate_all() {
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    const Kind& kind = kinds_[k];
    const Offer offer = offers_[k];
    for (std::size_t m = 0; m < kind.members.size(); ++m) {
      const Outlook& outlook = kind.outlooks[m];
      const bool told = kind.readable && outlook.tells(offer.prompt_tokens, offer.at);
      const Picoseconds first =
          told ? outlook.first_token(kind.model, kind.async, kind.prompt, offer.at) : ask(kind.members[m]);
      ttft_s_[static_cast<std::size_t>(kind.members[m])] = seconds(first, offer);
    }
  }
  estimated_.resize(views_.size());
  std::iota(estimated_.begin(), estimated_.end(), 0);
}

double Fleet::weighted(double utility, double ttft_s) const {
  return std::isfinite(ttft_s) ? utility - query_.latency_weight * ttft_s : -kInf;
}

template <typename Possible, typename Visit>
void Fleet::descend(std::size_t k, const Possible& possible, const Visit& visit) {
  if (possible(at_least(k, 1))) descend_below(k, 1, possible, visit);
}

template <typename Possible, typename Visit>
void Fleet::descend_below(std::size_t k, std::size_t node, const Possible& possible, const Visit& visit) {
  Kind& kind = kinds_[k];
  while (node < kind.width) {
    std::size_t first = 2 * node, second = first + 1;
    Picoseconds sooner = bound(kind, first), later = bound(kind, second);
    if (later < sooner) {
      std::swap(first, second);
      std::swap(sooner, later);
    }
    if (!possible(seconds(sooner, offers_[k]))) return;
    descend_below(k, first, possible, visit);
    if (kind.floors[second].plain == kNever || !possible(seconds(later, offers_[k]))) return;
    node = second;
  }
  const std::size_t member = node - kind.width;
  if (kind.forget(member, offers_[k].at) && !possible(at_least(k, node))) return;
  if (allowed(kind.members[member])) visit(kind.members[member]);
}

// Kinds by value, the largest first, at equal values the first of them.
void Fleet::order_kinds() {
  heap_.resize(kinds_.size());
  std::iota(heap_.begin(), heap_.end(), 0);
  std::make_heap(heap_.begin(), heap_.end(), [this](auto a, auto b) { return behind(a, b); });
}

std::int32_t Fleet::next_kind() {
  std::pop_heap(heap_.begin(), heap_.end(), [this](auto a, auto b) { return behind(a, b); });
  const std::int32_t kind = heap_.back();
  heap_.pop_back();
  return kind;
}

bool Fleet::feasible(std::int32_t i) const {
  const double t = known(i);
  return t <= query_.target_s && std::isfinite(t);
}

// Of the views estimated, those that could be chosen and are best by value, then by TTFT.
template <typename Value>
void Fleet::keep_best(const Value& value) {
  double best = -kInf, fastest = kInf;
  for (const std::int32_t i : estimated_) {
    if (!allowed(i)) continue;
    const double v = value(i), t = known(i);
    if (v < best || (v == best && t > fastest)) continue;
    if (v > best || t < fastest) choice_.best.clear();
    best = v;
    fastest = t;
    choice_.best.push_back(i);
  }
  std::sort(choice_.best.begin(), choice_.best.end());
}

// Eq. 3 among kinds of equal utility. False: none of their views meets the target.
bool Fleet::best_of_level() {
  double best = kInf;
  const auto possible = [&](double least) { return least <= query_.target_s && least <= best; };
  const auto visit = [&](std::int32_t i) {
    const double t = estimate(i);
    if (feasible(i)) best = std::min(best, t);
  };
  for (const std::int32_t k : level_) descend(static_cast<std::size_t>(k), possible, visit);
  if (best == kInf) return false;
  const double utility = value_[static_cast<std::size_t>(level_.front())];
  for (const std::int32_t i : estimated_) {
    if (known(i) == best && offer_of(i).utility == utility && allowed(i)) choice_.best.push_back(i);
  }
  std::sort(choice_.best.begin(), choice_.best.end());
  return true;
}

// Make sure that of these kinds' views the first ones that meet the target are estimated: so many of the best, unless
// one that is none of them comes before. Returns how many are still missing; one view is the runner-up of whoever of
// the best is chosen, or the first of them is and its own is the second.
std::int64_t Fleet::find_feasible(std::int64_t wanted) {
  members_.clear();
  for (const std::int32_t k : level_) {
    const std::vector<std::int32_t>& members = kinds_[static_cast<std::size_t>(k)].members;
    if (level_.size() == 1) return count_feasible(members, wanted);
    members_.insert(members_.end(), members.begin(), members.end());
  }
  if (!std::is_sorted(members_.begin(), members_.end())) std::sort(members_.begin(), members_.end());
  return count_feasible(members_, wanted);
}

std::int64_t Fleet::count_feasible(const std::vector<std::int32_t>& members, std::int64_t wanted) {
  for (const std::int32_t i : members) {
    if (!allowed(i)) continue;
    const auto at = static_cast<std::size_t>(i);
    const auto k = static_cast<std::size_t>(kind_of_view_[at]);
    const std::size_t leaf = kinds_[k].width + static_cast<std::size_t>(place_of_view_[at]);
    if (std::isnan(known(i)) && at_least(k, leaf) > query_.target_s) continue;
    estimate(i);
    if (!feasible(i)) continue;
    const bool is_best = std::binary_search(choice_.best.begin(), choice_.best.end(), i);
    wanted = is_best ? wanted - 1 : 0;
    if (wanted == 0) break;
  }
  return wanted;
}

void Fleet::decide_slo() {
  for (std::size_t k = 0; k < kinds_.size(); ++k) value_[k] = offers_[k].utility;
  order_kinds();
  std::int64_t missing = query_.explain == Explain::choice ? 0 : 2;  // the runner-up may be the first of its equals
  bool chosen = false;
  while (!heap_.empty() && (!chosen || missing > 0)) {
    level_.assign(1, next_kind());
    const double utility = value_[static_cast<std::size_t>(level_.front())];
    while (!heap_.empty() && value_[static_cast<std::size_t>(heap_.front())] == utility) level_.push_back(next_kind());
    const bool first = !chosen;
    if (first) chosen = best_of_level();
    if (chosen && missing > 0) missing = find_feasible(missing);
  }
  choice_.because = chosen ? Because::feasible : Because::infeasible;
  if (!chosen) decide_infeasible();
}

// Nobody meets the target: the smallest TTFT.
void Fleet::decide_infeasible() {
  TwoBest best;
  for (const std::int32_t i : estimated_) {
    if (allowed(i)) best.add(-known(i));
  }
  const auto possible = [&](double least) { return -least >= best.needed(query_.explain); };
  const auto visit = [&](std::int32_t i) {
    if (std::isnan(known(i))) best.add(-estimate(i));
  };
  for (std::size_t k = 0; k < kinds_.size(); ++k) descend(k, possible, visit);
  keep_best([&](std::int32_t i) { return -known(i); });
}

void Fleet::decide_weighted() {
  for (std::size_t k = 0; k < kinds_.size(); ++k) {
    value_[k] = weighted(offers_[k].utility, at_least(k, 1));
  }
  order_kinds();
  TwoBest best;
  for (const std::int32_t i : estimated_) {
    if (allowed(i)) best.add(weighted(offer_of(i).utility, known(i)));
  }
  while (!heap_.empty()) {
    const auto k = static_cast<std::size_t>(next_kind());
    const auto possible = [&](double least) { return weighted(offers_[k].utility, least) >= best.needed(query_.explain); };
    descend(k, possible, [&](std::int32_t i) {
      if (!std::isnan(known(i))) return;
      estimate(i);
      best.add(weighted(offer_of(i).utility, known(i)));
    });
  }
  keep_best([&](std::int32_t i) { return weighted(offer_of(i).utility, known(i)); });
  choice_.because = std::isfinite(known(choice_.best.front())) ? Because::score : Because::infeasible;
}

const Choice& Fleet::decide(const Query& query, std::span<const Offer> offers, std::span<const std::uint8_t> healthy) {
  check(query, offers, healthy);
  begin(query, offers, healthy);
  if (query.explain == Explain::all) estimate_all();
  query.objective == Objective::slo ? decide_slo() : decide_weighted();
  return choice_;
}

std::vector<double> Fleet::score() const {
  std::vector<double> score(views_.size(), -kInf);
  for (const std::int32_t i : estimated_) {
    double& s = score[static_cast<std::size_t>(i)];
    if (!allowed(i)) continue;
    if (choice_.because == Because::score) {
      s = weighted(offer_of(i).utility, known(i));
    } else if (choice_.because == Because::infeasible) {
      s = -known(i);
    } else if (feasible(i)) {
      s = offer_of(i).utility;
    }
  }
  return score;
}

}  // namespace simcluster
