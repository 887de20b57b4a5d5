// The module ridgeline._kernels; its types are in src/ridgeline/_kernels.pyi.
#include "bind.h"

#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bf16_dots.h"
#include "dispatch.h"
#include "matrix_unit.h"

NB_MODULE(_kernels, m) {
    using namespace ridgeline;
    nb::set_leak_warnings(false);  // what lives until the interpreter ends is no leak
    isa();                         // an instruction set that cannot be had is an error now, not in the first kernel
    matrix_unit();
    m.def("isa", [] { return std::string(isa_name(isa())); });
    m.def("isas", &isa_names);
    m.def("matrix_unit", [] { return std::string(unit_name(matrix_unit())); });
    m.def("unit_refusal", &unit_refusal);
    m.def("bf16_refusal", &bf16_refusal);
    m.def("dots_refusal", &dots_refusal);
    bind_pool(m);
    bind_record(m);
    bind_attention(m);
    bind_matrix(m);
    bind_linear(m);
    bind_experts(m);
    bind_latent(m);
    bind_recurrent(m);
    bind_selection(m);
    bind_elementwise(m);
    bind_low_rank(m);
    bind_tokens(m);
}
