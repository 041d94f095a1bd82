#include "named_calls.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "core/error.h"
#include "python_text.h"
#include "without_gil.h"

namespace py = pybind11;

namespace horon::torch_backend {
namespace {

// Behind each function.
struct Bound {
  std::shared_ptr<NamedEngineHost> host;
  py::handle internal_error;  // the module keeps it
};

constexpr const char* kCapsule = "horon.named_calls";

const Bound& bound(PyObject* capsule) {
  return *static_cast<const Bound*>(PyCapsule_GetPointer(capsule, kCapsule));
}

// In a handler: sets Python's error to what PyTorch makes of the exception.
PyObject* translate_as_torch() {
  HANDLE_TH_ERRORS
  throw;
  END_HANDLE_TH_ERRORS
}

// Without HANDLE_TH_ERRORS around the call: its buffer for warnings, which there are none of here,
// takes as long as all the rest of a short call.
template <typename Call>
PyObject* translating(const Bound& self, const Call& call) {
  try {
    return call();
  } catch (const UsageError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const Error& error) {
    PyErr_SetString(self.internal_error.ptr(), error.what());
  } catch (...) {
    return translate_as_torch();
  }
  return nullptr;
}

// Releasing the GIL and taking it again costs more than a submission: it stays where nothing waits.
std::uint64_t submit(NamedEngineHost& host, const OperationPtr& operation, bool will_wait) {
  if (const auto handle = host.try_submit(operation, will_wait)) {
    return *handle;
  }
  const GilReleased no_gil;
  return host.submit(operation, will_wait);
}

OperationPtr take(NamedEngineHost& host, std::uint64_t handle) {
  if (OperationPtr done = host.try_take(handle)) {
    return done;
  }
  const GilReleased no_gil;
  return host.take(handle);
}

const at::Tensor& tensor_of(PyObject* object, const char* what) {
  if (!THPVariable_Check(object)) {
    throw UsageError(
        concat("ALLREDUCE: ", what, " must be a torch.Tensor, got ", Py_TYPE(object)->tp_name));
  }
  return THPVariable_Unpack(object);
}

template <typename Number>
Number checked(Number number) {
  if (number == static_cast<Number>(-1) && PyErr_Occurred() != nullptr) {
    throw python_error();
  }
  return number;
}

PyObject* allreduce(PyObject* capsule, PyObject* const* arguments, Py_ssize_t count) {
  const Bound& self = bound(capsule);
  return translating(self, [&]() -> PyObject* {
    constexpr Py_ssize_t kArguments = 8;
    HORON_CHECK(count == kArguments, "allreduce: expected ", kArguments, " arguments, got ", count);
    const at::Tensor& tensor = tensor_of(arguments[0], "the tensor");
    const at::Tensor& output = tensor_of(arguments[1], "the output");
    const std::string_view name = text_of(arguments[2]);
    const Reduced how{static_cast<int>(checked(PyLong_AsLong(arguments[3]))),
                      checked(PyFloat_AsDouble(arguments[4])),
                      checked(PyFloat_AsDouble(arguments[5])), 0};
    const auto process_set = static_cast<int>(checked(PyLong_AsLong(arguments[6])));
    const bool will_wait = checked(PyObject_IsTrue(arguments[7])) != 0;
    const OperationPtr operation =
        self.host->make_allreduce(process_set, tensor, output, name, how);
    return PyLong_FromUnsignedLongLong(submit(*self.host, operation, will_wait));
  });
}

PyObject* take(PyObject* capsule, PyObject* handle) {
  const Bound& self = bound(capsule);
  return translating(self, [&]() -> PyObject* {
    const auto number = checked(PyLong_AsUnsignedLongLong(handle));
    const OperationPtr done = take(*self.host, number);
    if (!done) {
      Py_RETURN_NONE;
    }
    if (done->is_in_place()) {
      return THPVariable_Wrap(done->take_result());
    }
    TensorList results;
    {
      const GilReleased no_gil;
      results = done->take_results();
    }
    if (done->returns_tensor) {
      return THPVariable_Wrap(std::move(results.front()));
    }
    return py::cast(std::move(results)).release().ptr();
  });
}

// PyCFunction is what CPython calls any of them, whatever they take.
PyMethodDef kMethods[] = {
    {"allreduce", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(allreduce)),
     METH_FASTCALL, "allreduce(tensor, output, name, op, prescale, postscale, process_set, wait)"},
    {"take", take, METH_O, "take(handle)"},
};

py::object bind(PyMethodDef* method, const py::capsule& capsule) {
  PyObject* function = PyCFunction_New(method, capsule.ptr());
  if (function == nullptr) {
    throw py::error_already_set();
  }
  return py::reinterpret_steal<py::object>(function);
}

}  // namespace

py::tuple make_named_calls(const std::shared_ptr<NamedEngineHost>& host,
                           py::handle internal_error) {
  const py::capsule capsule(new Bound{host, internal_error}, kCapsule, [](PyObject* dying) {
    delete static_cast<Bound*>(PyCapsule_GetPointer(dying, kCapsule));
  });
  return py::make_tuple(bind(&kMethods[0], capsule), bind(&kMethods[1], capsule));
}

}  // namespace horon::torch_backend
