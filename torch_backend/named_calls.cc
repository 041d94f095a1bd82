#include "named_calls.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "core/error.h"
#include "python_text.h"

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

template <typename Call>
PyObject* translating(const Bound& self, const Call& call) {
  HANDLE_TH_ERRORS
  try {
    return call();
  } catch (const UsageError& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const Error& error) {
    PyErr_SetString(self.internal_error.ptr(), error.what());
  }
  return nullptr;
  END_HANDLE_TH_ERRORS
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
    std::uint64_t handle = 0;
    {
      const py::gil_scoped_release no_gil;
      handle = self.host->submit(operation, will_wait);
    }
    return PyLong_FromUnsignedLongLong(handle);
  });
}

PyObject* take(PyObject* capsule, PyObject* handle) {
  const Bound& self = bound(capsule);
  return translating(self, [&]() -> PyObject* {
    const auto number = checked(PyLong_AsUnsignedLongLong(handle));
    OperationPtr done;
    at::Tensor result;
    TensorList results;
    {
      const py::gil_scoped_release no_gil;
      done = self.host->take(number);
      if (done && done->returns_tensor) {
        result = done->take_result();
      } else if (done) {
        results = done->take_results();
      }
    }
    if (!done) {
      Py_RETURN_NONE;
    }
    if (done->returns_tensor) {
      return THPVariable_Wrap(std::move(result));
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
