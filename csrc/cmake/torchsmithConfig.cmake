# find_package(torchsmith): the target torchsmith::torchsmith adds the include folder and what loading a package needs (dlopen).
# Point CMake here with -Dtorchsmith_DIR="$(python -m torchsmith aot paths cmake)".
get_filename_component(_torchsmith_root "${CMAKE_CURRENT_LIST_DIR}" DIRECTORY)
if(NOT TARGET torchsmith::torchsmith)
  add_library(torchsmith::torchsmith INTERFACE IMPORTED)
  set_target_properties(torchsmith::torchsmith PROPERTIES
    INTERFACE_INCLUDE_DIRECTORIES "${_torchsmith_root}/include"
    INTERFACE_LINK_LIBRARIES "${CMAKE_DL_LIBS}")
endif()
set(torchsmith_INCLUDE_DIRS "${_torchsmith_root}/include")
set(torchsmith_FOUND TRUE)
unset(_torchsmith_root)
