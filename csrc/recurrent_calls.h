// Recurrent mixers by all threads of a pool.
#pragma once
#include "recurrent.h"
#include "threads.h"

namespace ridgeline {

void run(Pool::Hold&, const ShortConv&);
void run(Pool::Hold&, const SelectiveScan&);
void run(Pool::Hold&, const LinearScan&);
void run(Pool::Hold&, const TaylorScan&);

}  // namespace ridgeline
