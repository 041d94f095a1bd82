// Strings of Python's, without a copy.
#pragma once

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/python_headers.h>

#include <string_view>

namespace horon::torch_backend {

// Valid as long as the string. Throws python_error for what is not a string, or has no UTF-8 form.
// Requires the GIL.
inline std::string_view text_of(PyObject* string) {
  Py_ssize_t size = 0;
  const char* text = PyUnicode_AsUTF8AndSize(string, &size);
  if (text == nullptr) {
    throw python_error();
  }
  return {text, static_cast<std::size_t>(size)};
}

}  // namespace horon::torch_backend
