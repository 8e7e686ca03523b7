// Hands work items out to threads.
#pragma once

#include <omp.h>

#include <atomic>
#include <cstdint>

namespace multihead {

// Calls work(item, thread) once for each item in [0, items), in ascending order of their start.
// The runtime is the OpenMP library that the process already has, torch's own; its thread count is
// passed in, since a global setting would be shared with torch.
template <class Work>
void for_each_item(int64_t items, int threads, const Work& work) {
  if (threads <= 1) {
    for (int64_t item = 0; item < items; ++item) work(item, 0);
    return;
  }
  std::atomic<int64_t> next{0};
#pragma omp parallel num_threads(threads)
  {
    const int thread = omp_get_thread_num();
    for (int64_t item; (item = next.fetch_add(1, std::memory_order_relaxed)) < items;)
      work(item, thread);
  }
}

}  // namespace multihead
