// What each operator takes inside torch's dispatcher, for the thread that switches this on.
// `gaps.py` builds it and says what it is for.

#include <ATen/record_function.h>

#include <cstring>
#include <ctime>

namespace {

constexpr int NAMES = 512, DEPTH = 256, LONGEST = 63;

struct Sum {
  char name[LONGEST + 1];
  int64_t calls, inner, ns;  // inner: operators called by it; ns: without theirs
};

struct Frame {
  int64_t start, inner_ns;
  Sum* sum;
};

Sum sums[NAMES];
Frame frames[DEPTH];
int depth = 0;
int64_t outer = 0;  // operators called by none
at::CallbackHandle handle;

int64_t now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000LL + t.tv_nsec;
}

Sum* sum_of(const char* name) {  // by content: some names are gone after their call
  unsigned hash = 5381;
  for (const char* c = name; *c != 0; ++c) hash = hash * 33 + static_cast<unsigned char>(*c);
  unsigned place = hash % NAMES;
  while (sums[place].name[0] != 0 && std::strncmp(sums[place].name, name, LONGEST) != 0) {
    place = (place + 1) % NAMES;
  }
  if (sums[place].name[0] == 0) std::strncpy(sums[place].name, name, LONGEST);
  return &sums[place];
}

using Note = void (*)(const at::RecordFunction&);
Note twin_enters = nullptr, twin_leaves = nullptr;

void enters(const at::RecordFunction& call) {
  TORCH_CHECK(depth < DEPTH, "operators call each other too deeply");
  ++(depth > 0 ? frames[depth - 1].sum->inner : outer);
  Frame& frame = frames[depth++];
  frame.sum = sum_of(call.name());
  frame.inner_ns = 0;
  frame.start = now();
}

void leaves(const at::RecordFunction&) {
  const int64_t end = now();
  Frame& frame = frames[--depth];
  const int64_t whole = end - frame.start;
  ++frame.sum->calls;
  frame.sum->ns += whole - frame.inner_ns;
  if (depth > 0) frames[depth - 1].inner_ns += whole;
}

// The clock is read last here and first below: what all this takes is in no operator's own time.
std::unique_ptr<at::ObserverContext> enter(const at::RecordFunction& call) {
  if (twin_enters != nullptr) twin_enters(call);
  enters(call);
  return nullptr;
}

void leave(const at::RecordFunction& call, at::ObserverContext*) {
  leaves(call);
  if (twin_leaves != nullptr) twin_leaves(call);
}

}  // namespace

extern "C" {

void observer_on() {
  for (Sum& sum : sums) sum.calls = sum.inner = sum.ns = 0;
  outer = depth = 0;
  handle = at::addThreadLocalCallback(
      at::RecordFunctionCallback(enter, leave).scopes({at::RecordScope::FUNCTION}));
}

void observer_off() { at::removeCallback(handle); }

Note observer_enters() { return enters; }

Note observer_leaves() { return leaves; }

// Another copy of this library, which notes the same beside it; null = none.
void observer_twin(Note enters, Note leaves) { twin_enters = enters, twin_leaves = leaves; }

int64_t observer_outer() { return outer; }

// The next operator that was called, from `place` on; -1 behind the last one.
int observer_next(int place, const char** name, int64_t* numbers) {
  for (; place < NAMES; ++place) {
    const Sum& sum = sums[place];
    if (sum.calls == 0) continue;
    *name = sum.name;
    numbers[0] = sum.calls, numbers[1] = sum.inner, numbers[2] = sum.ns;
    return place + 1;
  }
  return -1;
}

}  // extern "C"
