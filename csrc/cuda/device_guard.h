// Makes a device current for the calling thread, and the former one again at the end of the scope.
#pragma once

namespace horon {

class DeviceGuard {
 public:
  // Throws CudaError.
  explicit DeviceGuard(int device);
  ~DeviceGuard();
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;

 private:
  int former_ = 0;
  bool has_changed_ = false;
};

}  // namespace horon
