// The private extension module; one file per topic.
#include "bindings.hpp"

NB_MODULE(_native, m) {
  m.doc() = "Engine model of one serving instance and the SFS estimator (C++).";
  bind_scheduler(m);
  bind_engine(m);
  bind_view(m);
  bind_sfs_plus(m);
  bind_decide(m);
  bind_bench(m);
  bind_cluster(m);
  bind_channel(m);
  bind_watch(m);
  bind_relay(m);
}
