// How freed host memory is treated.
#pragma once

namespace manus_fast {

// Tells the C allocator to keep large freed blocks instead of giving them back to the kernel. Training on a CPU frees and
// takes the same tens of megabytes thousands of times, and each return costs page faults: an element-wise product of
// 20 MB took 8.6 ms with them and 1.5 ms without (2 cores, torch 2.13). Returns false where the allocator is not glibc's.
bool keep_freed_memory();

}  // namespace manus_fast
