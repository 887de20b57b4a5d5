#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.h"

namespace ridgeline {

void bind_record(nb::module_& m) {
    nb::class_<Rooms>(m, "Rooms").def(nb::init<>()).def("poison", &Rooms::poison);
    nb::class_<Program>(m, "Program")
        .def(nb::init<Pool&, std::shared_ptr<Rooms>>(), nb::arg("pool"), nb::arg("rooms"), nb::keep_alive<1, 2>())
        .def(
            "know", [](Program& p, const nb::ndarray<nb::ro, nb::device::cpu>& a) { p.know(a); }, array("array"))
        .def("record", &Program::record, nb::arg("work"))
        .def(
            "borrow", [](Program& p, const Output& a) { return Rooms::borrow(p.rooms(), a); }, array("array"))
        .def_prop_ro("refusal",
                     [](const Program& p) {
                         return p.refusal().empty() ? std::nullopt : std::optional<std::string>(p.refusal());
                     })
        .def("__len__", &Program::size)
        .def("__call__", [](Program& p) {
            if (!p.refusal().empty()) refuse("this program must not run: " + p.refusal());
            nb::gil_scoped_release release;
            p.run();
        });
}

// Memory for results, which belongs to the program while calls are recorded, and constants that the program keeps.
void bind_room(nb::class_<Pool>& pool) {
    pool.def_prop_ro("recording", [](const Pool& p) { return Program::of(p) != nullptr; })
        .def(
            "keep",
            [](Pool& p, nb::object constant) {
                Program* program = Program::of(p);
                if (!program) return;
                program->know(nb::cast<nb::ndarray<nb::ro, nb::device::cpu>>(constant));
                program->keep(std::move(constant));
            },
            nb::arg("constant"))
        .def(
            "room",
            [](Pool& p, const std::vector<size_t>& shape) {
                Program* program = Program::of(p);
                if (!program) refuse("this memory is available only while calls are recorded");
                return program->rooms()->lend(shape);
            },
            nb::arg("shape"));
}

}  // namespace ridgeline
