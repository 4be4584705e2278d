// The cluster: every request is accounted for once, lazily fresh views equal snapshots taken at every look, and
// rows leave in order without changing what they say.
#include "cluster.hpp"

#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "check.hpp"
#include "helpers.hpp"

using namespace simcluster;
using namespace simcluster::testing;

namespace {

constexpr std::size_t kRequests = 400, kInstances = 3;

// Columns of a run with two groups of instances, some clients that leave, and prompts that never fit.
struct Columns {
  std::vector<std::int64_t> prompt, output, predicted, max_tokens, priority, cancel_after, arrival;
  std::unique_ptr<bool[]> by_length = std::make_unique<bool[]>(kRequests);

  explicit Columns(std::uint32_t seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::int64_t low, std::int64_t high) {
      return low + static_cast<std::int64_t>(random() % static_cast<std::uint32_t>(high - low + 1));
    };
    std::int64_t now = 0;
    for (std::size_t i = 0; i < kRequests; ++i) {
      now += draw(0, 10) * kMs * 4;
      arrival.push_back(now);
      for (int group = 0; group < 2; ++group) {
        prompt.push_back(draw(0, 20) == 0 ? 100000 : draw(1, 40));
        output.push_back(draw(1, 30));
        predicted.push_back(12);
      }
      max_tokens.push_back(draw(0, 3) == 0 ? draw(1, 40) : -1);
      priority.push_back(0);
      cancel_after.push_back(draw(0, 9) == 0 ? draw(0, 200) * kMs : -1);
      by_length[i] = draw(0, 3) == 0;
    }
  }

  Cluster::Requests requests() const {
    Cluster::Requests r;
    r.num_groups = 2;
    r.prompt_tokens = prompt;
    r.output_tokens = output;
    r.predicted_output = predicted;
    r.max_tokens = max_tokens;
    r.priority = priority;
    r.cancel_after = cancel_after;
    r.ends_by_length = {by_length.get(), kRequests};
    return r;
  }
};

StepNoise noise(std::uint64_t instance) {
  StepNoise n;
  n.factors = std::make_shared<const std::vector<std::int64_t>>(
      std::vector<std::int64_t>{std::int64_t{1} << 31, std::int64_t{1} << 32, std::int64_t{3} << 31});
  n.seed = 5;
  n.instance = instance;
  return n;
}

// Engines with few blocks, so that some requests are preempted, and a cluster of them with one router.
struct Setup {
  Columns columns;
  std::vector<std::unique_ptr<Engine>> engines;
  std::vector<std::unique_ptr<InstanceView>> views;
  Cluster cluster;

  Setup(std::uint32_t seed, bool async, bool in_order, Cluster::Watch watch = Cluster::Watch::nothing)
      : columns(seed), cluster(columns.requests(), in_order, watch) {
    std::vector<InstanceView*> seen;
    for (std::size_t j = 0; j < kInstances; ++j) {
      const SchedulerConfig config = plain(async, 40);
      engines.push_back(std::make_unique<Engine>(config, u_step(), noise(j)));
      views.push_back(std::make_unique<InstanceView>(config, u_step(), 12, true));
      seen.push_back(views.back().get());
      cluster.add_instance(std::make_unique<NativePort>(*engines.back()), {j % 2, 0.001, 1e-5, 3 * kMs, false, async});
    }
    cluster.add_router(seen);
  }
};

void every_request_is_accounted_for_once_and_rows_may_leave_early() {
  for (const bool async : {false, true}) {
    Setup early(7, async, true), late(7, async, true);
    std::vector<Cluster::Row> rows;
    for (std::size_t i = 0; i < kRequests; ++i) {
      const Picoseconds now = early.columns.arrival[i];
      for (Setup* s : {&early, &late}) s->cluster.dispatch(static_cast<std::int64_t>(i), i % kInstances, now, now,
                                                           Cluster::kNobody);
      if (i % 7 == 0) early.cluster.advance(now);  // who looks when makes no difference
      for (const Cluster::Row& row : early.cluster.take_rows(early.cluster.num_ready(3))) rows.push_back(row);
    }
    const std::size_t taken = rows.size();
    CHECK(taken > kRequests / 2 && taken < kRequests);
    for (Setup* s : {&early, &late}) {
      s->cluster.advance(kNever - 1);
      CHECK(s->cluster.num_open() == 0);
      s->cluster.finish(kNever - 1, false);
    }
    for (const Cluster::Row& row : early.cluster.take_rows(kRequests)) rows.push_back(row);
    const std::vector<Cluster::Row> all = late.cluster.take_rows(kRequests);
    CHECK(rows.size() == kRequests && all.size() == kRequests);
    std::int64_t preempted = 0, rejected = 0, failed = 0;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const Cluster::Row &a = rows[i], &b = all[i];
      CHECK(a.request == static_cast<std::int64_t>(i) && b.request == a.request);
      CHECK(a.status == b.status && a.reason == b.reason && a.status != Cluster::RowStatus::unfinished);
      CHECK(a.scheduled == b.scheduled && a.first_token == b.first_token && a.end == b.end);
      CHECK(a.output_tokens == b.output_tokens && a.preemptions == b.preemptions);
      CHECK(a.scheduled == Cluster::kDidNotCome || a.scheduled >= a.arrival);
      CHECK(a.end >= a.first_token);
      preempted += a.preemptions;
      rejected += a.status == Cluster::RowStatus::rejected;
      failed += a.status == Cluster::RowStatus::failed;
    }
    CHECK(preempted > 0 && rejected > 0 && failed > 0);
  }
}

// Though nobody asks the views before the instances have moved on.
void a_view_shows_its_last_refresh_whenever_it_is_asked() {
  for (const bool async : {false, true}) {
    Setup lazy(13, async, true), eager(13, async, true);
    std::int64_t moved = 0;
    for (std::size_t i = 0; i < kRequests; ++i) {
      const Picoseconds now = static_cast<Picoseconds>(i) * 20 * kMs, later = now + 7 * kMs;
      lazy.cluster.refresh(0, now);
      eager.cluster.show(0, eager.cluster.capture(now));
      for (Setup* s : {&lazy, &eager}) {
        if (i % 3 != 0) s->cluster.advance(later);
        s->cluster.dispatch(static_cast<std::int64_t>(i), i % kInstances, later, later, i % 2 ? 0 : Cluster::kNobody);
      }
      for (std::size_t j = 0; j < kInstances; ++j) {
        InstanceView &a = *lazy.views[j], &b = *eager.views[j];
        CHECK(a.num_dispatched_since() == b.num_dispatched_since() && a.num_resident() == b.num_resident());
        CHECK(a.prefill_tokens_left() == b.prefill_tokens_left() && a.decode_tokens_left() == b.decode_tokens_left());
        CHECK(a.snapshot().boundary == b.snapshot().boundary && a.snapshot().intake == b.snapshot().intake);
        const Dispatch query{100000, 20, 12, -1, false, 0, later, later};
        CHECK(a.estimate_first_token(query) == b.estimate_first_token(query));
        moved += a.snapshot().boundary < Snapshot::capture(*lazy.engines[j]).boundary;
      }
    }
    CHECK(moved > 50);
  }
}

void a_view_that_outlives_its_cluster_shows_the_last_refresh() {
  const Columns columns(3);
  Engine engine(plain(true, 40), u_step());
  InstanceView view(plain(true, 40), u_step(), 12, true);
  {
    Cluster cluster(columns.requests(), true, Cluster::Watch::nothing);
    cluster.add_instance(std::make_unique<NativePort>(engine), {0, 0, 0, 0, false, true});
    cluster.add_router({&view});
    for (std::int64_t i = 0; i < 9; ++i) cluster.dispatch(i, 0, i * kMs, i * kMs, 0);
    cluster.refresh(0, 200 * kMs);
  }
  CHECK(view.snapshot().boundary > 0 && view.snapshot().boundary == Snapshot::capture(engine).boundary);
}

// Checks the bounds of an outlook; whether they say more than the arrival.
bool is_bound(const InstanceView& view, const Outlook& known, const Dispatch& query, Picoseconds first) {
  const Picoseconds own = view.least().prompt(query.prompt_tokens);
  const Picoseconds past = view.least().past_hinge(query.prompt_tokens);
  if (query.at < known.earliest) return false;
  const bool now = query.at <= known.until;
  CHECK(first >= (now ? known.at_least : known.at_least_later) + own);
  CHECK(first >= (now ? known.at_least_hinged : known.at_least_later) + own + past);
  return known.at_least > query.at + view.least().batch;
}

// A view that is refreshed only where something is new estimates as one that gets a new snapshot at every look.
void a_lazily_fresh_view_is_as_fresh_as_one_with_new_snapshots_at_every_look() {
  for (const bool async : {false, true}) {
    Setup lazy(11, async, true), eager(11, async, true);
    std::int64_t num_bound = 0;
    for (std::size_t i = 0; i < kRequests; ++i) {
      const Picoseconds now = lazy.columns.arrival[i];
      lazy.cluster.refresh(0, now);
      eager.cluster.show(0, eager.cluster.capture(now));
      for (std::size_t j = 0; j < kInstances; ++j) {
        if (i % 5 == 4 && j % 3 == i % 3) continue;  // what bounds it is then older than its state
        InstanceView &a = *lazy.views[j], &b = *eager.views[j];
        const Dispatch early{100000, 7, 12, -1, false, 0, now, now};
        const Outlook unseen = a.outlook();
        num_bound += is_bound(a, unseen, early, b.estimate_first_token(early));
        CHECK(a.num_resident() == b.num_resident() && a.kv_usage() == b.kv_usage());
        CHECK(a.snapshot().boundary == b.snapshot().boundary && a.snapshot().intake == b.snapshot().intake);
        for (const std::int64_t tokens : {20, 5, 33}) {  // asked more than once, a view keeps what it has computed
          const Dispatch query{100000, tokens, 12, -1, false, 0, now, now};
          const Outlook before = a.outlook();
          const Picoseconds first = a.estimate_first_token(query);
          CHECK(first == b.estimate_first_token(query));
          num_bound += is_bound(a, before, query, first);
        }
      }
      const std::size_t chosen = (i * i) % kInstances;
      const bool by_others = i % 11 == 0;  // so the router does not know of it
      for (Setup* s : {&lazy, &eager}) {
        s->cluster.dispatch(static_cast<std::int64_t>(i), chosen, now, now, by_others ? Cluster::kNobody : 0);
      }
    }
    CHECK(num_bound > 1000);
  }
}

void somebody_who_waits_is_told_of_every_end_at_the_instant_it_was_promised() {
  for (const bool async : {false, true}) {
    Setup s(13, async, false, Cluster::Watch::ends);
    std::size_t told = 0, sent = 0;
    Picoseconds now = 0;
    while (sent < kRequests || s.cluster.num_open() > 0) {
      const Picoseconds arrival = sent < kRequests ? s.columns.arrival[sent] : kNever;
      const Picoseconds end = s.cluster.next_end(arrival);
      const bool arrives = arrival < end;
      now = std::max(now, arrives ? arrival : end);
      if (arrives) {
        const auto request = static_cast<std::int64_t>((sent % 2 == 0) ? sent + 1 : sent - 1);  // out of order
        s.cluster.dispatch(request, sent++ % kInstances, now, now, Cluster::kNobody);
      } else {
        s.cluster.advance_to_ends(now);
        CHECK(!s.cluster.notices().empty());
      }
      for (const Cluster::Notice& notice : s.cluster.notices()) CHECK(notice.kind >= EventKind::finished);
      told += s.cluster.notices().size();
      s.cluster.notices().clear();
    }
    CHECK(told == kRequests);
  }
}

void rows_of_one_instant_leave_together_where_requests_wait_for_others() {
  Columns columns(1);
  for (std::int64_t& tokens : columns.prompt) tokens = 4;
  for (std::int64_t& after : columns.cancel_after) after = -1;
  Engine engine(plain(false), u_step());
  Cluster cluster(columns.requests(), false, Cluster::Watch::nothing);
  cluster.add_instance(std::make_unique<NativePort>(engine), {});
  for (const std::int64_t request : {4, 2, 3}) cluster.dispatch(request, 0, 0, 0, Cluster::kNobody);
  cluster.turn_away(0, 0);
  CHECK(cluster.num_ready(1) == 0);
  cluster.advance(1000 * 1000 * kMs);
  CHECK(cluster.num_ready(1) == 4);
  CHECK(cluster.num_ready(5) == 0);
  cluster.dispatch(1, 0, 1000 * 1000 * kMs, 1000 * 1000 * kMs, Cluster::kNobody);
  CHECK(cluster.num_ready(1) == 4);
  CHECK(cluster.take_rows(4).back().reason == Cluster::Reason::shed);
  CHECK(cluster.num_sent() == 5 && cluster.num_ready(1) == 0);
}

void what_has_not_reached_its_client_before_a_cut_did_not_happen() {
  Columns columns(1);
  columns.prompt[0] = 4, columns.output[0] = 2, columns.cancel_after[0] = -1;
  columns.max_tokens[0] = -1, columns.by_length[0] = false;
  for (const Picoseconds cut : {20 * kMs, 35 * kMs, 40 * kMs}) {  // 14 ms and 25 ms, and 12 ms back to the client
    Engine engine(plain(false), u_step());
    Cluster cluster(columns.requests(), true, Cluster::Watch::nothing);
    Cluster::Place place;
    place.output_hop = 12 * kMs;
    cluster.add_instance(std::make_unique<NativePort>(engine), place);
    cluster.dispatch(0, 0, 0, 0, Cluster::kNobody);
    cluster.advance(cut);
    cluster.finish(cut, true);
    const Cluster::Row row = cluster.take_rows(1).front();
    CHECK((row.status == Cluster::RowStatus::finished) == (cut == 40 * kMs));
    CHECK((row.first_token == Cluster::kDidNotCome) == (cut == 20 * kMs));
    CHECK(row.output_tokens == (cut == 20 * kMs ? 0 : 2));
  }
}

void wrong_calls_are_refused() {
  Setup s(3, false, true);
  Cluster::Requests short_by_one = s.columns.requests();
  short_by_one.priority = short_by_one.priority.first(kRequests - 1);
  CHECK(throws<std::invalid_argument>([&] { Cluster(short_by_one, true, Cluster::Watch::nothing); }));
  CHECK(throws<std::invalid_argument>([&] { s.cluster.dispatch(0, kInstances, 0, 0, Cluster::kNobody); }));
  CHECK(throws<std::invalid_argument>([&] { s.cluster.dispatch(5, 0, 0, 0, Cluster::kNobody); }));
  CHECK(throws<std::invalid_argument>([&] { s.cluster.show(0, {}); }));
  s.cluster.dispatch(0, 0, 0, 0, Cluster::kNobody);
  CHECK(throws<std::invalid_argument>([&] { s.cluster.dispatch(0, 0, 0, 0, Cluster::kNobody); }));
}

}  // namespace

int main() {
  every_request_is_accounted_for_once_and_rows_may_leave_early();
  a_view_shows_its_last_refresh_whenever_it_is_asked();
  a_view_that_outlives_its_cluster_shows_the_last_refresh();
  a_lazily_fresh_view_is_as_fresh_as_one_with_new_snapshots_at_every_look();
  somebody_who_waits_is_told_of_every_end_at_the_instant_it_was_promised();
  rows_of_one_instant_leave_together_where_requests_wait_for_others();
  what_has_not_reached_its_client_before_a_cut_did_not_happen();
  wrong_calls_are_refused();
  return report("cluster");
}
