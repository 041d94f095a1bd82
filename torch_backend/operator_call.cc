#include "operator_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <ATen/record_function.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include "collective.h"
#include "operators.h"
#include "python_text.h"
#include "without_gil.h"

namespace py = pybind11;

namespace horon::torch_backend {
namespace {

constexpr const char* kQualifiedName = "horon::all_reduce_";

// The dispatcher would do nothing but call the kernel.
bool is_ordinary(PyObject* object) {
  if (!THPVariable_CheckExact(object) || at::impl::torch_function_mode_enabled()) {
    return false;
  }
  const at::Tensor& tensor = THPVariable_Unpack(object);
  // Modes, functorch's transforms, tracers and the like announce themselves by included keys.
  return is_plain_cpu(tensor) && !tensor.requires_grad() &&
         c10::impl::tls_local_dispatch_key_set().included_ == c10::default_included_set &&
         !at::hasCallbacks();
}

// Bound to the function that was there before.
PyObject* call_all_reduce(PyObject* through_dispatcher, PyObject* const* arguments,
                          Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  constexpr Py_ssize_t kArguments = 3;
  if (names == nullptr && count == kArguments && PyUnicode_Check(arguments[1]) &&
      PyUnicode_Check(arguments[2]) && is_ordinary(arguments[0])) {
    const at::Tensor& tensor = THPVariable_Unpack(arguments[0]);
    const std::string_view op = text_of(arguments[1]);
    const std::string_view group_name = text_of(arguments[2]);
    bool is_done = false;
    {
      const GilReleased no_gil;
      is_done = all_reduce_in_group(tensor, op, group_name);
    }
    if (is_done) {
      Py_RETURN_NONE;
    }
  }
  return PyObject_Vectorcall(through_dispatcher, arguments, static_cast<std::size_t>(count), names);
  END_HANDLE_TH_ERRORS
}

// PyCFunction is what CPython calls any of them, whatever they take.
PyMethodDef kAllReduce = {
    "all_reduce_", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(call_all_reduce)),
    METH_FASTCALL | METH_KEYWORDS,
    "all_reduce_(tensor, op, group_name): reduces a tensor in place over a process group."};

}  // namespace

void shorten_operator_calls() {
  const py::object packet =
      py::module_::import("torch").attr("ops").attr("horon").attr("all_reduce_");
  const py::object before = packet.attr("_op");
  PyObject* made =
      PyCFunction_NewEx(&kAllReduce, before.ptr(), py::object(before.attr("__module__")).ptr());
  if (made == nullptr) {
    throw py::error_already_set();
  }
  const auto function = py::reinterpret_steal<py::object>(made);
  // torch.jit.script knows operators by the identity of this object.
  py::module_::import("torch.jit._builtins").attr("_register_builtin")(function, kQualifiedName);
  packet.attr("_op") = function;
}

}  // namespace horon::torch_backend
