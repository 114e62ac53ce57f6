#include "common/memory.h"

#include <limits.h>
#ifdef __GLIBC__
#include <malloc.h>
#endif

namespace manus_fast {

bool keep_freed_memory() {
#ifdef __GLIBC__
  // One arena: the backward pass runs on a thread of its own, whose arena could not reuse what the forward pass freed.
  return mallopt(M_ARENA_MAX, 1) == 1 && mallopt(M_MMAP_MAX, 0) == 1 && mallopt(M_TRIM_THRESHOLD, INT_MAX) == 1 &&
         mallopt(M_TOP_PAD, 64 << 20) == 1;
#else
  return false;
#endif
}

}  // namespace manus_fast
