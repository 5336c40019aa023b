// Tells the process that made an object from its forked children. A child has none of the parent's threads, nor an
// arena's memory: joining or unmapping there what it inherited would hang it, or take away what it mapped itself.
#pragma once

#include <sys/types.h>
#include <unistd.h>

#include <memory>

namespace ssdplan {

class Owner {
  public:
    bool is_this_process() const noexcept { return ::getpid() == pid_; }

  private:
    pid_t pid_ = ::getpid();
};

// For what has threads: destroyed by the process that made it, left alone by a child.
struct DeleteByOwner {
    template <typename T>
    void operator()(T* object) const noexcept {
        if (owner.is_this_process()) std::default_delete<T>{}(object);
    }

    Owner owner{};
};

template <typename T>
using OwnedPtr = std::unique_ptr<T, DeleteByOwner>;

}  // namespace ssdplan
