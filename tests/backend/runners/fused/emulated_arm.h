// What a library for this machine and the fused step for another processor, in an emulator, write to each other.
//
// emulated_arm_library.cpp has the C interface of the fused step; each of its functions sends a request and all memory
// that the step reads to emulated_arm_program.cpp, which contains the step itself, and fetches what it has written.
#pragma once

#include <unistd.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

enum class Request : int32_t { CREATE, STEP, DESTROY };

struct BuiltKernels {
  char instructions[64];
  int32_t lanes, byte_dots, bfloat16_dots;
};

struct StepSizes {
  int32_t rows, sequences, table_width, wanted, wanted_hidden, threads;
};

// A pipe in each direction. Both processes are little-endian and lay structures out alike.
class Pipes {
 public:
  Pipes(int from, int to) : from_(from), to_(to) {}

  void write(const void* content, size_t size) {
    for (const char* at = (const char*)content; size;) {
      const ssize_t written = ::write(to_, at, size);
      if (written <= 0) end("the other process takes nothing");
      at += written, size -= written;
    }
  }
  // Returns false where the other process has closed its end before the first byte.
  bool read(void* content, size_t size) {
    for (size_t got = 0; got < size;) {
      const ssize_t count = ::read(from_, (char*)content + got, size - got);
      if (count <= 0 && !got) return false;
      if (count <= 0) end("a message is not complete");
      got += count;
    }
    return true;
  }
  template <class T>
  void put(const T& value) {
    write(&value, sizeof value);
  }
  template <class T>
  T get() {
    T value;
    if (!read(&value, sizeof value)) end("the other process has ended");
    return value;
  }
  // An array; its address may be null where it has no entries.
  template <class T>
  void put_array(const T* first, size_t count) {
    const int64_t size = first ? (int64_t)(count * sizeof(T)) : -1;
    put(size);
    if (size > 0) write(first, size);
  }
  // An array that `arrays` owns from now on; null where the sender has none.
  template <class T>
  T* get_array(std::vector<std::vector<char>>& arrays) {
    const int64_t size = get<int64_t>();
    if (size < 0) return nullptr;
    arrays.emplace_back(size + 1);  // of an empty array too there is an address
    if (size && !read(arrays.back().data(), size)) end("the other process has ended");
    return (T*)arrays.back().data();
  }

 private:
  [[noreturn]] static void end(const char* why) {
    std::fprintf(stderr, "fused step in an emulator: %s\n", why);
    std::abort();
  }

  int from_, to_;
};

inline size_t head_bytes(bool kv_is_bytes, int head_dim) {  // of a block and KV head; see step/attention.h
  return 32 * head_dim * (kv_is_bytes ? sizeof(int8_t) : sizeof(uint16_t)) + (kv_is_bytes ? 32 * sizeof(float) : 0);
}
