// The whole test framework: a check that says where it failed, and a count of failures as exit code.
#pragma once

#include <cstdio>

namespace simcluster::testing {

inline int failures = 0;

template <typename Exception, typename Action>
bool throws(Action action) {
  try {
    action();
  } catch (const Exception&) {
    return true;
  }
  return false;
}

inline int report(const char* topic) {
  if (failures == 0) std::printf("%s: all checks hold\n", topic);
  return failures == 0 ? 0 : 1;
}

}  // namespace simcluster::testing

#define CHECK(condition)                                                              \
  do {                                                                                \
    if (!(condition)) {                                                               \
      std::printf("%s:%d: does not hold: %s\n", __FILE__, __LINE__, #condition);      \
      ++simcluster::testing::failures;                                                \
    }                                                                                 \
  } while (false)
