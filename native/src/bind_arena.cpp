// The Python face of the arena: memory that is handed out by DLPack, every view counted.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <memory>
#include <optional>
#include <utility>

#include "arena.hpp"
#include "bindings.hpp"
#include "dlpack.hpp"

namespace py = pybind11;
using namespace py::literals;

namespace ssdplan {
namespace {

// One exported view. It keeps the mapping alive until the consumer calls the deleter.
struct Export {
    explicit Export(std::shared_ptr<Mapping> mapping_) : mapping(std::move(mapping_)) {
        shape = static_cast<std::int64_t>(mapping->nbytes());
        managed.tensor = {mapping->data(), {dlpack::kCpu, 0}, 1, {dlpack::kUnsigned, 8, 1}, &shape, &stride, 0};
        managed.manager_context = this;
        managed.deleter = [](dlpack::ManagedTensor* self) {
            const std::unique_ptr<Export> owner(static_cast<Export*>(self->manager_context));
        };
        mapping->exports.fetch_add(1);
    }
    Export(const Export&) = delete;
    Export& operator=(const Export&) = delete;
    ~Export() { mapping->exports.fetch_sub(1); }

    std::shared_ptr<Mapping> mapping;
    std::int64_t shape = 0;
    std::int64_t stride = 1;
    dlpack::ManagedTensor managed{};
};

constexpr const char* kCapsuleName = "dltensor";

// A capsule that nobody consumed still owns its view; a consumed one was renamed.
void destroy_capsule(PyObject* capsule) {
    if (PyCapsule_IsValid(capsule, kCapsuleName) == 0) return;
    auto* const managed = static_cast<dlpack::ManagedTensor*>(PyCapsule_GetPointer(capsule, kCapsuleName));
    managed->deleter(managed);
}

py::object export_arena(const Arena& arena, const py::object& stream, const py::object& /* max_version */,
                        const std::optional<std::pair<int, int>>& device, const std::optional<bool>& copy) {
    if (!stream.is_none()) throw py::buffer_error("an arena is CPU memory: stream must be None");
    if (device && *device != std::pair<int, int>{dlpack::kCpu, 0}) {
        throw py::buffer_error("an arena is CPU memory: it cannot be exported to another device");
    }
    if (copy.value_or(false)) throw py::buffer_error("an arena is exported without a copy only");
    auto view = std::make_unique<Export>(arena.share());
    PyObject* const capsule = PyCapsule_New(&view->managed, kCapsuleName, destroy_capsule);
    if (capsule == nullptr) throw py::error_already_set();
    (void)view.release();  // the capsule, and then its consumer, calls the deleter
    return py::reinterpret_steal<py::object>(capsule);
}

}  // namespace

void bind_arena(py::module_& module) {
    py::class_<Arena>(module, "Arena", R"(One block of host memory of exactly the size asked for.

An anonymous mapping whose size is `nbytes` rounded up to one page and nothing more (torch's page-locked allocator
rounds to a power of two; see MemAscend on exact page-locked allocation). Its start is aligned to 2 MiB when it is at
least that long, huge pages are asked for, every page is touched at creation, and it is page-locked where
RLIMIT_MEMLOCK allows; where not, `locked` is False and `lock_error` says why. A forked child does not inherit it.

`torch.from_dlpack(arena)` is a uint8 tensor of shape (nbytes,) on it, without a copy. Such views are counted: `close`
refuses while one is alive, and the memory itself outlives the arena for as long as one is. It starts zeroed.)")
        .def(py::init([](std::int64_t nbytes, bool lock) {
                 const py::gil_scoped_release release;  // touching many pages takes seconds
                 return std::make_unique<Arena>(nbytes, lock);
             }),
             "nbytes"_a, py::kw_only(), "lock"_a = true,
             R"(Map, touch and (with `lock`) page-lock `nbytes` bytes.

Raises ValueError when nbytes is not positive, and MemoryError, naming nbytes, when it is more than the system or this
process's control group has left.)")
        .def_property_readonly("nbytes", &Arena::nbytes, "The size in bytes, as asked for.")
        .def_property_readonly("address", &Arena::address, "The address of the first byte. RuntimeError when closed.")
        .def_property_readonly("locked", &Arena::locked, "Whether it is page-locked. RuntimeError when closed.")
        .def_property_readonly("lock_error", &Arena::lock_error,
                               "Why it is not page-locked; empty when it is. RuntimeError when closed.")
        .def_property_readonly("huge_bytes", py::cpp_function(&Arena::huge_bytes, ReleaseLock()),
                               R"(How many of its bytes huge pages back just now, as the kernel counts them.

Where the kernel joined it with a neighbouring mapping, the neighbour's may be among them. RuntimeError when closed.)")
        .def_property_readonly("exports", &Arena::exports, "How many exported views are alive.")
        .def("__dlpack__", &export_arena, py::kw_only(), "stream"_a = py::none(), "max_version"_a = py::none(),
             "dl_device"_a = py::none(), "copy"_a = py::none(),
             "A DLPack capsule: uint8, shape (nbytes,), CPU, never a copy. BufferError for anything else.")
        .def(
            "__dlpack_device__", [](const Arena&) { return std::pair<int, int>{dlpack::kCpu, 0}; },
            "(1, 0): the CPU, in DLPack's terms.")
        .def("close", &Arena::close,
             "Give the memory back. RuntimeError while exported views are alive; closing twice is nothing.");
}

}  // namespace ssdplan
