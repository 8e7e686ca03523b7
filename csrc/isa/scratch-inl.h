// A thread's memory, laid out by asking for one array after the other.
#pragma once

namespace multihead {
namespace {

// With a null base it only counts the bytes that are needed.
struct Arena {
  uintptr_t base;
  size_t bytes;

  explicit Arena(void* memory) : base(reinterpret_cast<uintptr_t>(memory)), bytes(0) {}

  template <class T>
  T* take(int64_t count) {
    T* here = reinterpret_cast<T*>(base + bytes);
    bytes += (static_cast<size_t>(count) * sizeof(T) + 63) / 64 * 64;
    return here;
  }
};

}  // namespace
}  // namespace multihead
