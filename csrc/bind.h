// What each file of bindings adds to the module.
#pragma once
#include "arrays.h"

namespace ridgeline {

void bind_pool(nb::module_& m);
void bind_attention(nb::module_& m);
void bind_linear(nb::module_& m);

}  // namespace ridgeline
