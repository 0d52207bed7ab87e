# cmake --install: a prefix that may be moved. Components: static, shared, headers, kernels (attune_add_kernels).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_LIBDIR}/cmake/attune")
set(doc_dir "${CMAKE_INSTALL_DATADIR}/doc/attune")

# Two libraries with attune inside may be in one process: none offers its copy to the other.
target_link_options(attune INTERFACE "$<INSTALL_INTERFACE:LINKER:--exclude-libs,libattune.a>")
set_target_properties(attune PROPERTIES EXPORT_NAME static)
install(TARGETS attune EXPORT attune-static ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT static
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
set(kinds static)
if(ATTUNE_SHARED)
  list(APPEND kinds shared)
  set_target_properties(attune_shared PROPERTIES EXPORT_NAME shared)
  install(TARGETS attune_shared EXPORT attune-shared LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT shared
          NAMELINK_COMPONENT shared INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
endif()
# What makes kernels: the library without any, the generator program, the rules and what they call.
set(kernels_dir "${CMAKE_INSTALL_DATADIR}/attune")
target_link_options(attune_bare INTERFACE "$<INSTALL_INTERFACE:LINKER:--exclude-libs,libattune_runtime.a>")
set_target_properties(attune_bare PROPERTIES EXPORT_NAME runtime)
install(TARGETS attune_bare EXPORT attune-kernels ARCHIVE DESTINATION "${CMAKE_INSTALL_LIBDIR}" COMPONENT kernels
        INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(TARGETS attune-halide-gen EXPORT attune-kernels RUNTIME DESTINATION "${CMAKE_INSTALL_LIBEXECDIR}/attune" COMPONENT kernels)
install(FILES "${PROJECT_SOURCE_DIR}/cmake/attune_kernel_rules.cmake" "${PROJECT_SOURCE_DIR}/cmake/attune_add_kernels.cmake"
              "${PROJECT_SOURCE_DIR}/cmake/catalogue.py" "${PROJECT_SOURCE_DIR}/cmake/device_code.py" "${PROJECT_SOURCE_DIR}/cmake/compile_mod.py"
        DESTINATION "${kernels_dir}/cmake" COMPONENT kernels)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/generators/mlir" DESTINATION "${kernels_dir}/generators" COMPONENT kernels
        FILES_MATCHING PATTERN "*.py" PATTERN "*.mlir")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/generators/halide/include" DESTINATION "${kernels_dir}/generators/halide" COMPONENT kernels)
install(DIRECTORY "${PROJECT_SOURCE_DIR}/generators/catalogue" DESTINATION "${kernels_dir}/generators" COMPONENT kernels)
install(FILES "${PROJECT_SOURCE_DIR}/runtime/device/phases.h" DESTINATION "${kernels_dir}/runtime/device" COMPONENT kernels)
install(FILES "${PROJECT_SOURCE_DIR}/runtime/halide/phases.h" DESTINATION "${kernels_dir}/runtime/halide" COMPONENT kernels)
install(FILES "${PROJECT_SOURCE_DIR}/runtime/mlir/phases.h" "${PROJECT_SOURCE_DIR}/runtime/mlir/mma.h" DESTINATION "${kernels_dir}/runtime/mlir"
        COMPONENT kernels)
install(EXPORT attune-kernels NAMESPACE attune:: DESTINATION "${package_dir}" COMPONENT kernels)
set(has_devices TRUE)
if(ATTUNE_GPU STREQUAL "OFF")
  set(has_devices FALSE)
endif()

foreach(kind ${kinds})
  install(EXPORT attune-${kind} NAMESPACE attune:: DESTINATION "${package_dir}" COMPONENT ${kind})
endforeach()
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/attune" DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}" COMPONENT headers)
install(FILES "${PROJECT_SOURCE_DIR}/LICENSE" "${PROJECT_SOURCE_DIR}/THIRD-PARTY.txt" DESTINATION "${doc_dir}" COMPONENT headers)

configure_package_config_file("${PROJECT_SOURCE_DIR}/cmake/attuneConfig.cmake.in" "${CMAKE_BINARY_DIR}/attuneConfig.cmake"
                              INSTALL_DESTINATION "${package_dir}" PATH_VARS kernels_dir NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# Below 1.0 a minor version may break what is linked against it.
write_basic_package_version_file("${CMAKE_BINARY_DIR}/attuneConfigVersion.cmake" COMPATIBILITY SameMinorVersion)
install(FILES "${CMAKE_BINARY_DIR}/attuneConfig.cmake" "${CMAKE_BINARY_DIR}/attuneConfigVersion.cmake" DESTINATION "${package_dir}"
        COMPONENT headers)

# attune.pc is the shared library, attune-static.pc the archive: with both in one folder, -lattune always means the first.
file(RELATIVE_PATH to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" "/")
string(REGEX REPLACE "/$" "" to_prefix "${to_prefix}")
foreach(kind ${kinds})
  if(kind STREQUAL "static")
    set(pc_name attune-static)
    set(pc_what "archive")
    set(pc_libs "-L\${libdir} -l:libattune.a -Wl,--exclude-libs,libattune.a -lstdc++ -lm -lpthread -ldl")
  else()
    set(pc_name attune)
    set(pc_what "shared library")
    set(pc_libs "-L\${libdir} -lattune")
  endif()
  configure_file("${PROJECT_SOURCE_DIR}/cmake/attune.pc.in" "${CMAKE_BINARY_DIR}/${pc_name}.pc" @ONLY)
  install(FILES "${CMAKE_BINARY_DIR}/${pc_name}.pc" DESTINATION "${CMAKE_INSTALL_LIBDIR}/pkgconfig" COMPONENT ${kind})
endforeach()
