// Recurrent mixers on all threads of a pool.
#pragma once
#include "delta.h"
#include "lru.h"
#include "recurrent.h"
#include "state_space.h"
#include "threads.h"

namespace ridgeline {

void run(Pool::Hold&, const ShortConv&);
void run(Pool::Hold&, const SelectiveScan&);
void run(Pool::Hold&, const LinearScan&);
void run(Pool::Hold&, const TaylorScan&);
void run(Pool::Hold&, const DeltaScan&);
void run(Pool::Hold&, const StateSpace&);
void run(Pool::Hold&, const GatedLru&);

}  // namespace ridgeline
